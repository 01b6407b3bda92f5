"""Probes of the real torchtitan, on CPU processes with gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from probe_helpers import HERE, processes_with, spec_in, wait_for_outcome, wait_until

from titan_tune.domain.probe import ProbeStatus
from titan_tune.probe import files
from titan_tune.probe.local import LocalRunner

pytestmark = pytest.mark.torchtitan

ROOT = Path(files.__file__).parents[2]
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
{model}
[training]
local_batch_size = 2
global_batch_size = 4
seq_len = 128
steps = {steps}
[debug]
seed = 1
[titan_tune]
data = "synthetic"
custom_import = "{custom_import}"
[titan_tune.model_args]
dim = 64
n_layers = {layers}
n_heads = 4
vocab_size = 512
"""


def job(directory, *, steps=4, custom_import="", model="", layers=2, more=""):
    named = {"steps": steps, "custom_import": custom_import, "model": model, "layers": layers}
    return JOB.format(dump=directory / "outputs", **named) + more


def probe_of(runner, directory, *, nproc, steps=4, settings=None, **changes):
    spec = spec_in(
        directory,
        nproc=nproc,
        toml=job(directory, steps=steps, **changes),
        environment=[("PYTHONPATH", f"{ROOT}{os.pathsep}{HERE}")],
        tokens=4 * 128 / nproc,
        **{"steps": steps, "warmup_steps": 1, **(settings or {})},
    )
    return runner.start(spec)


@pytest.fixture(scope="module")
def runners():
    """One for each launcher; the first is the default."""
    with (
        LocalRunner(2, "cpu", grace_seconds=3) as default,
        LocalRunner(2, "cpu", grace_seconds=3, launcher="torchrun") as torchrun,
    ):
        yield {"preloaded": default, "torchrun": torchrun}


@pytest.fixture
def runner(runners):
    return runners["preloaded"]


DDP = "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 1\n"


def test_a_split_over_ranks_trains_on_the_tokens_of_an_accumulation(runner, tmp_path):
    ranks = wait_for_outcome(probe_of(runner, tmp_path / "ranks", nproc=2, more=DDP))
    steps = wait_for_outcome(probe_of(runner, tmp_path / "steps", nproc=1))
    assert (ranks.status, steps.status) == (ProbeStatus.COMPLETED, ProbeStatus.COMPLETED), (ranks, steps)
    # the same weights (one seed) and the same global batch: bf16 sums differ by their order alone
    assert ranks.measurement.losses[0] == pytest.approx(steps.measurement.losses[0], rel=1e-3)
    assert [memory.rank for memory in ranks.measurement.memory] == [0, 1]
    assert all(memory.active_bytes > 100 * 2**20 for memory in ranks.measurement.memory)
    assert ranks.measurement.measured_steps == 3
    headers = [log.header for log in _metrics(tmp_path / "ranks").logs.values()]
    assert [header["num_parameters"] for header in headers] == [steps.details["num_parameters"]] * 2


def _metrics(directory):
    metrics = files.Metrics(directory / "trial")
    metrics.read_new()
    return metrics


def test_the_loss_falls_on_synthetic_tokens_under_fsdp(runner, tmp_path):
    fast = "[optimizer]\nlr = 1e-2\n[lr_scheduler]\nwarmup_steps = 1\n"
    outcome = wait_for_outcome(probe_of(runner, tmp_path, nproc=2, steps=12, more=fast))
    assert outcome.status is ProbeStatus.COMPLETED, outcome
    assert outcome.measurement.losses[-1] < outcome.measurement.losses[0] - 0.3


def test_a_configuration_that_torchtitan_refuses(runner, tmp_path):
    outcome = wait_for_outcome(probe_of(runner, tmp_path, nproc=1, model='converters = ["float8"]'))
    assert outcome.status is ProbeStatus.UNSUPPORTED
    assert outcome.message == "KeyError: 'float8' (rank 0, init)"


@pytest.mark.parametrize("launcher", ["preloaded", "torchrun"])
def test_cancel_ends_workers_that_ignore_sigterm(runners, tmp_path, launcher):
    probe = probe_of(runners[launcher], tmp_path, nproc=2, steps=10_000, custom_import="fault_ignore_sigterm")
    wait_until(lambda: probe.poll() or probe.progress().step >= 1, seconds=120)
    outcome = probe.cancel()
    assert (outcome.status, outcome.details["launcher"]) == (ProbeStatus.CANCELLED, launcher)
    assert probe._attempt.warden.exit_record()["killed"] >= 2
    assert processes_with(probe._attempt.warden.probe_id) == []


def test_a_rank_that_stops_is_a_hang(runner, tmp_path):
    settings = {"hang_seconds": 3, "steps": 6}
    outcome = wait_for_outcome(
        probe_of(runner, tmp_path, nproc=2, steps=6, custom_import="fault_hang", settings=settings)
    )
    assert outcome.status is ProbeStatus.HANG
    assert outcome.details["steps"] == 2


def test_the_second_compilation_comes_from_the_cache(runner, tmp_path):
    compile_loss = '[compile]\nenable = true\ncomponents = ["loss"]\n'

    def compiler_of(name):
        probe = probe_of(runner, tmp_path, nproc=1, steps=2, layers=1, more=compile_loss)
        outcome = wait_for_outcome(probe)
        assert outcome.status is ProbeStatus.COMPLETED, (name, outcome)
        return outcome.details["compiler"]

    first, second = compiler_of("first"), compiler_of("second")
    assert first["captured_graphs"] > 0
    assert (
        first["autograd_cache_hit"] + first["fxgraph_cache_hit"]
        < second["autograd_cache_hit"] + second["fxgraph_cache_hit"]
    )
    assert second["autograd_cache_miss"] + second["fxgraph_cache_miss"] == 0
    assert list((tmp_path / "cache" / "rank0" / "inductor").rglob("*"))


def test_an_exported_file_runs_under_plain_torchrun_without_our_variables(tmp_path):
    path = tmp_path / "best.toml"
    path.write_text(job(tmp_path, steps=2))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TITAN_TUNE_")}
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
         "-m", "torchtitan.train", "--job.config_file", str(path)],
        env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "step:  2" in result.stderr + result.stdout
    assert not list(tmp_path.rglob("metrics.rank*")) + list(tmp_path.rglob("error.rank*"))
