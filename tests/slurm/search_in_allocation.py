"""A search inside an allocation, for tests: runs probes as steps side by side and prints what became of them.

``python search_in_allocation.py DIRECTORY '[{"name": ..., "nodes": ..., "nproc": ..., "scenario": {...}}, ...]'``.
"""

import json
import sys
import time
from pathlib import Path

from slurm_helpers import FAKE_PYTHON, spec_in

from titan_tune.domain.cluster import ClusterSpec, GpuSpec
from titan_tune.probe.slurm import make_allocation_runner
from titan_tune.probe.slurm.settings import SlurmSettings

directory, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
gpu = GpuSpec(name="test", memory_gib=80, bf16_tflops=1, memory_gb_per_s=1, link_gb_per_s=1)
device = "cuda" if any(probe["nproc"] > 1 for probe in wanted) else "cpu"
cluster = ClusterSpec(gpu=gpu, num_nodes=wanted[0]["nodes"], gpus_per_node=wanted[0]["nproc"])
settings = SlurmSettings(python=str(FAKE_PYTHON), cache_directory=str(directory / "cache"))
runner = make_allocation_runner(
    settings, cluster=cluster, device=device, slots=None, study="test", directory=directory
)
with runner:
    probes = []
    for probe in wanted:
        spec = spec_in(directory / probe.pop("name"), device=device, **{"hang_seconds": 3, **probe})
        probes.append(runner.start(spec))
    while not all(probe.poll() for probe in probes):
        time.sleep(0.05)
answer = {
    "slots": runner.slots,
    "statuses": [str(probe.outcome.status) for probe in probes],
    "messages": [probe.outcome.message for probe in probes],
    "attempts": [probe.outcome.attempts for probe in probes],
}
(directory / "answer.json").write_text(json.dumps(answer))
