"""Plans a search over more than a million combinations: seconds, peak memory, and what became of them.

    python benchmarks/million.py

Llama 3 8B on 64 H100s. Plans it once, in this process; peak resident memory is the whole process's.
"""

from __future__ import annotations

import resource
import sys
import time

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.space.axes import Space
from titan_tune.space.default import space_from_job
from titan_tune.study.plan import Plan, make_plan
from titan_tune.titan.job import job_from_text

JOB = """\
[model]
name = "llama3"
flavor = "8B"

[training]
seq_len = 8192
local_batch_size = 2
global_batch_size = 128

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
"""
AXES = {
    "activation_checkpoint": ["none", "selective-op", "selective-2", "full", "memory_budget-0.5"],
    "compile": ["off", "default", "max-autotune-no-cudagraphs"],
    "parallelism": "auto",
    "local_batch_size": "auto",
    "float8": ["off", "tensorwise", "rowwise", "tensorwise-fsdp_all_gather"],
    "parallelism.fsdp_reshard_after_forward": ["default", "always", "never"],
    "parallelism.enable_async_tensor_parallel": [False, True],
    "parallelism.disable_loss_parallel": [False, True],
}
NODES, GPUS_PER_NODE = 8, 8


def million() -> Space:
    """The space of the benchmark."""
    cluster = ClusterSpec(gpu=gpu_spec("h100-80gb"), num_nodes=NODES, gpus_per_node=GPUS_PER_NODE)
    return space_from_job(job_from_text(JOB, name="million.toml"), cluster, axes=AXES)


def report(plan: Plan, seconds: float, processor_seconds: float) -> str:
    # Linux counts KiB, macOS bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    lines = [
        f"{plan.total:,} combinations in {seconds:.1f} s ({processor_seconds:.1f} s of processor time), "
        f"peak resident memory {peak / 2**30:.2f} GiB",
        *(f"{count:>9,} rejected by {rule}" for rule, count in plan.rejected.most_common()),
        f"{plan.duplicates:>9,} the same run as another",
        f"{plan.total - plan.duplicates - sum(plan.rejected.values()):>9,} fit",
        f"{len(plan.pool):>9,} kept",
        *plan.notes,
        f"predicted best: {plan.pool[0].label}",
    ]
    return "\n".join(lines)


def main() -> None:
    space = million()
    start, processor_start = time.perf_counter(), time.process_time()
    plan = make_plan(space)
    print(report(plan, time.perf_counter() - start, time.process_time() - processor_start))


if __name__ == "__main__":
    main()
