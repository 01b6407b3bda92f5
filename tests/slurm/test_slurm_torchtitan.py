"""The real torchtitan on two nodes of a real Slurm, on CPU with gloo."""

import math
import sys
from dataclasses import replace

import pytest
from slurm_helpers import SHORT, cause_of, outcome_of, processes_of, wait_until

from titan_tune.domain.probe import ProbeStatus

pytestmark = [pytest.mark.slurm, pytest.mark.torchtitan]

JOB = """
[job]
custom_config_module = "titan_tune.titan.plugin.config"
dump_folder = "{dump}"
[experimental]
custom_import = "titan_tune.titan.plugin"
[metrics]
log_freq = 1
disable_color_printing = true
[model]
name = "llama3"
flavor = "tiny"
[training]
local_batch_size = 2
global_batch_size = 4
seq_len = 128
steps = {steps}
[debug]
seed = 1
[titan_tune]
data = "synthetic"
[titan_tune.model_args]
dim = 64
n_layers = 2
n_heads = 4
vocab_size = 512
"""


def start(slurm, *, steps):
    runner = slurm.runner(python=sys.executable, patience=replace(SHORT, settle=5.0))
    spec = slurm.spec(nodes=2, steps=steps, tokens=4 * 128 / 2)
    return runner.start(
        replace(spec, toml=JOB.format(dump=spec.directory / "outputs", steps=steps), environment=())
    )


def test_a_probe_across_two_nodes(slurm):
    probe = start(slurm, steps=4)
    outcome = outcome_of(probe, seconds=200)
    assert outcome.status is ProbeStatus.COMPLETED, outcome
    measurement = outcome.measurement
    assert (measurement.measured_steps, len(measurement.losses)) == (2, 4)
    assert all(math.isfinite(loss) for loss in measurement.losses)
    assert [memory.rank for memory in measurement.memory] == [0, 1]
    assert measurement.peak_active_bytes > 50 << 20
    hosts = {log.header["hostname"] for log in probe._attempt.metrics.logs.values()}
    assert hosts == {"node1", "node2"}
    assert (slurm.directory / "cache-0" / "rank1" / "inductor").is_dir()


def test_a_node_that_fails_is_no_fault_of_the_configuration(slurm, fault_row):
    probe = start(slurm, steps=100_000)
    wait_until(lambda: probe.poll() or probe.progress().step > 2, seconds=200)
    (header,) = [log.header for log in probe._attempt.metrics.logs.values() if log.rank == 1]
    assert header["hostname"] == "node2"
    slurm.set_down("node2")
    outcome = outcome_of(probe, seconds=60)
    assert outcome.status is ProbeStatus.INFRASTRUCTURE, outcome
    assert cause_of(outcome) == "node_fail"
    assert "node2" in outcome.message
    assert processes_of(probe) == []
    fault_row(
        "Slurm",
        "torchtitan on two nodes, one set DOWN",
        f"{outcome.status}: {outcome.message}",
        "told as it is",
    )
