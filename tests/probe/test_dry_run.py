"""The dry runner with stand-ins for its processes, and what its outcomes say."""

import json
import sys

import pytest
from dry_run_jobs import cluster_of, settings_of, spec_of
from probe_helpers import HERE, processes_with, wait_for_outcome, wait_until

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import Origin, ProbeOutcome, ProbeStatus
from titan_tune.errors import InputError, ProbesFailedError
from titan_tune.estimate.answer import answer_json
from titan_tune.estimate.reserved import outside_bytes
from titan_tune.probe import files
from titan_tune.probe.dry_run import DryRunner, dry_run_settings, rank_spec
from titan_tune.probe.dry_run_answer import answer_from
from titan_tune.probe.dry_run_outcome import failed_outcome
from titan_tune.probe.local import LocalRunner
from titan_tune.probe.record import read_outcome
from titan_tune.titan.job import job_from_text
from titan_tune.units import GIB

H200 = ClusterSpec(gpu=gpu_spec("h200"))
CPU = ClusterSpec(gpu=gpu_spec("h200").model_copy(update={"name": "cpu", "is_cpu": True}))
FSDP8 = {"data_parallel_shard_degree": 8}
PP4 = {"pipeline_parallel_degree": 4, "data_parallel_shard_degree": 2, "pipeline_parallel_schedule": "1F1B"}


class OnGpus(LocalRunner):
    """Takes specs for a GPU on a machine without one."""

    def start(self, spec):
        self.device = spec.device
        return super().start(spec)


@pytest.fixture
def dry_runner():
    """``make(scenario, cluster=..., devices=...)``: a runner whose ranks do as the scenario says."""
    made = []

    def make(scenario, *, cluster=None, machine=H200, devices=("0",)):
        text = json.dumps(scenario)
        processes = OnGpus(
            1,
            "cuda",
            grace_seconds=1,
            launcher="torchrun",
            command=lambda spec: [sys.executable, str(HERE / "fake_dry_run.py"), text],
        )
        runner = DryRunner(cluster or cluster_of(8), machine, devices=devices, runner=processes)
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.close()


def test_one_rank_measures_and_the_rest_is_computed(dry_runner, tmp_path):
    gather = {
        "op": "all_gather", "count": 10, "bytes": 10**9, "group_size": 8, "stride": 1, "first_rank": 0,
        "mesh_dim": "fsdp", "phase": "forward", "side_stream": True,
    }  # fmt: skip
    spec = spec_of(tmp_path, 8, **FSDP8)
    outcome = wait_for_outcome(
        dry_runner({"*": {"collectives": [gather]}}, machine=cluster_of(1)).start(spec)
    )
    assert outcome.status is ProbeStatus.COMPLETED, outcome
    measured = outcome.measurement
    assert measured.origin is Origin.DRY_RUN and measured.losses == ()
    assert (measured.peak_active_bytes, measured.peak_reserved_bytes) == (10 * GIB, 12 * GIB)
    settings = settings_of(8, **FSDP8)
    assert measured.peak_device_bytes == pytest.approx(12 * GIB + outside_bytes(settings), abs=1)
    assert 1.0 < measured.step_seconds < 2.0
    assert measured.tokens_per_second_per_gpu == pytest.approx(1000.0 / measured.step_seconds)
    assert measured.interval[0] < measured.tokens_per_second_per_gpu < measured.interval[1]
    details = outcome.details["dry_run"]
    assert details["communication_seconds"] > 0.0 < details["waiting_seconds"]
    added = details["communication_seconds"] + details["waiting_seconds"]
    assert added == pytest.approx(measured.step_seconds - 1.0)
    assert details["ranks"][0]["collectives"] == [
        {"cause": "fsdp", "op": "all_gather", "group_size": 8, "stride": 1, "count": 10, "gib": 10**10 / GIB}
    ]
    assert read_outcome(spec.directory) == outcome
    # of one GPU, not of the eight that the job would have
    assert 0 < outcome.details["gpu_seconds"] <= outcome.seconds
    seen = json.loads((spec.directory / "rank0" / "seen.json").read_text())
    assert seen == {"NGPU": "8", "CUDA_VISIBLE_DEVICES": "0"}


def test_every_pipeline_rank_runs_and_gpus_are_shared_out(dry_runner, tmp_path):
    chunks = {
        str(2 * rank): {
            "active": 10 + rank,
            "chunks": [
                {"stage": rank, "kind": "F", "count": 4, "seconds": 0.3},
                {"stage": rank, "kind": "B", "count": 4, "seconds": 0.6},
            ],
        }
        for rank in range(4)
    }
    runner = dry_runner(chunks, devices=("0", "1", "2"))
    assert runner.slots == 3
    spec = spec_of(tmp_path, 8, **PP4)
    outcome = wait_for_outcome(runner.start(spec))
    assert outcome.status is ProbeStatus.COMPLETED, outcome
    ranks = outcome.details["dry_run"]["ranks"]
    assert [(r["rank"], r["pipeline_rank"], r["active_gib"]) for r in ranks] == [
        (0, 0, 10), (2, 1, 11), (4, 2, 12), (6, 3, 13),
    ]  # fmt: skip
    assert ranks[0]["microbatch_passes"] == {"F": 4, "B": 4}
    assert outcome.measurement.peak_active_bytes == 13 * GIB
    # four microbatches through four equal stages: three more steps of the pipe than a rank has work
    assert outcome.details["dry_run"]["bubble_seconds"] > 3 * 0.9 / 4 * 0.5
    used = {
        json.loads((spec.directory / f"rank{rank}" / "seen.json").read_text())["CUDA_VISIBLE_DEVICES"]
        for rank in (0, 2, 4)
    }
    assert used == {"0", "1", "2"}


def test_a_target_that_is_too_small_is_out_of_memory(dry_runner, tmp_path):
    runner = dry_runner({"*": {"active": 90, "reserved": 95}})
    outcome = wait_for_outcome(runner.start(spec_of(tmp_path, 8, **FSDP8)))
    assert outcome.status is ProbeStatus.OOM
    assert outcome.message.startswith("rank 0 needs 9") and "(h100-80gb) has 79" in outcome.message
    answer = answer_from(
        settings_of(8, **FSDP8), job_values(**FSDP8), H200, outcome, tokens_per_step_per_rank=1000.0
    )
    document = answer_json(answer)
    assert (document["fits"], document["verdict"]) == (False, "does_not_fit")
    assert document["peak_active_gib"] == 90.0


def test_a_full_pool_is_pressure_only(dry_runner, tmp_path):
    runner = dry_runner({"*": {"active": 70, "reserved": 79}})
    outcome = wait_for_outcome(runner.start(spec_of(tmp_path, 8, **FSDP8)))
    assert outcome.status is ProbeStatus.COMPLETED
    assert any("expect allocation retries" in warning for warning in outcome.warnings)


def job_values(**job):
    from dry_run_jobs import job_text

    return job_from_text(job_text(**job), name="job").resolved()


CUDA_OOM = ["torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 1.00 GiB."]


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("b200", ProbeStatus.INFRASTRUCTURE, "the target (b200)"),
        ("h200", ProbeStatus.OOM, "out of device memory on rank 0"),
        ("h100-80gb", ProbeStatus.OOM, "out of device memory on rank 0"),
    ],
)
def test_running_out_counts_only_where_the_target_is_no_larger(dry_runner, tmp_path, target, status, said):
    runner = dry_runner({"*": {"error": CUDA_OOM}}, cluster=cluster_of(8, target))
    outcome = wait_for_outcome(runner.start(spec_of(tmp_path, 8, **FSDP8)))
    assert outcome.status is status
    assert said in outcome.message
    assert outcome.details["simulated_rank"] == 0


def failed(status, message, machine=H200, **details):
    outcome = ProbeOutcome(status, message, 1.0, details=details)
    return failed_outcome(settings_of(8, **FSDP8), machine, 3, outcome, seconds=2.0)


@pytest.mark.parametrize(
    ("status", "message", "machine", "expected"),
    [
        (
            ProbeStatus.UNSUPPORTED,
            "RuntimeError: Backend fake does not yet support x",
            H200,
            ProbeStatus.INFRASTRUCTURE,
        ),
        (
            ProbeStatus.COMPILE_FAILURE,
            "RuntimeError: symm_mem: no such group",
            H200,
            ProbeStatus.INFRASTRUCTURE,
        ),
        (ProbeStatus.UNSUPPORTED, "AssertionError: Invalid parallel dims", H200, ProbeStatus.UNSUPPORTED),
        (
            ProbeStatus.UNSUPPORTED,
            "\"histogram_cpu\" not implemented for 'Long'",
            CPU,
            ProbeStatus.INFRASTRUCTURE,
        ),
        (ProbeStatus.UNSUPPORTED, '"histogram_cpu" not implemented', H200, ProbeStatus.UNSUPPORTED),
        (ProbeStatus.DIVERGED, "the loss is not finite", H200, ProbeStatus.INFRASTRUCTURE),
        (ProbeStatus.HANG, "no step for 300 s", H200, ProbeStatus.HANG),
    ],
)
def test_failures_of_the_simulation_are_told_apart(status, message, machine, expected):
    outcome = failed(status, message, machine)
    assert outcome.status is expected
    assert message in outcome.message and outcome.details["simulated_rank"] == 3


def test_host_memory_is_the_configurations(tmp_path):
    assert failed(ProbeStatus.OOM, "out of host memory", memory="host").status is ProbeStatus.OOM


def test_the_first_failure_ends_the_other_ranks(dry_runner, tmp_path):
    scenario = {"*": {"sleep": True}, "4": {"error": ["builtins.ValueError", "no such thing"]}}
    runner = dry_runner(scenario, devices=("0", "1", "2", "3"))
    probe = runner.start(spec_of(tmp_path, 8, **PP4))
    marks = [item.probe._attempt.warden.probe_id for item in probe.ranks]
    outcome = wait_for_outcome(probe)
    assert outcome.status is ProbeStatus.UNSUPPORTED
    assert outcome.details["simulated_rank"] == 4
    assert [processes_with(mark) for mark in marks] == [[], [], [], []]
    assert len(runner._free) == 4


def test_cancel_ends_every_rank_and_frees_its_gpu(dry_runner, tmp_path):
    runner = dry_runner({"*": {"sleep": True}}, devices=("0", "1"))
    probe = runner.start(spec_of(tmp_path, 8, **PP4))
    assert len(probe.running_ranks()) == 2
    wait_until(lambda: (tmp_path / "trial" / "rank2" / "seen.json").exists())
    marks = [item.probe._attempt.warden.probe_id for item in probe.ranks if item.probe]
    outcome = probe.cancel()
    assert outcome.status is ProbeStatus.CANCELLED
    assert [processes_with(mark) for mark in marks] == [[], []]
    assert sorted(runner._free) == ["0", "1"]
    assert probe.poll() is outcome


def test_a_slow_rank_is_content_with_one_measured_step(dry_runner, tmp_path, monkeypatch):
    monkeypatch.setattr("titan_tune.probe.dry_run.ENOUGH_SECONDS", 0.0)
    stopped = []
    runner = dry_runner({"*": {"sleep": True}})
    probe = runner.start(spec_of(tmp_path, 8, **FSDP8))
    item = probe.ranks[0]
    monkeypatch.setattr(type(item.probe), "request_stop", lambda self, reason: stopped.append(reason))
    for step, expected in ((2, 0), (3, 1)):
        monkeypatch.setattr(
            type(item.probe), "progress", lambda self, step=step: type("P", (), {"step": step})()
        )
        probe.poll()
        assert len(stopped) == expected
    monkeypatch.undo()


def test_a_processor_says_valid_and_nothing_else(dry_runner, tmp_path):
    runner = dry_runner({}, machine=CPU, devices=(None,))
    outcome = wait_for_outcome(runner.start(spec_of(tmp_path, 8, **FSDP8)))
    assert outcome.status is ProbeStatus.COMPLETED and outcome.measurement is None
    assert outcome.details["dry_run"] == {"validity_only": True, "ranks": [0]}
    document = answer_json(
        answer_from(settings_of(8, **FSDP8), job_values(**FSDP8), CPU, outcome, tokens_per_step_per_rank=1.0)
    )
    assert (document["fits"], document["peak_active_gib"], document["step_time"]) == (None, None, None)
    assert document["dry_run"]["validity_only"] and document["invalid"] == []


def test_what_torchtitan_refuses_is_invalid_and_what_this_machine_cannot_is_an_error():
    settings, values = settings_of(8, **FSDP8), job_values(**FSDP8)
    refused = failed(ProbeStatus.UNSUPPORTED, "KeyError: 'float8' (rank 0, init)")
    answer = answer_from(settings, values, H200, refused, tokens_per_step_per_rank=1.0)
    assert [finding.message for finding in answer.invalid] == ["KeyError: 'float8' (rank 0, init)"]
    broken = failed(ProbeStatus.INFRASTRUCTURE, "no space left")
    with pytest.raises(ProbesFailedError, match="no space left"):
        answer_from(settings, values, H200, broken, tokens_per_step_per_rank=1.0)


def test_a_spec_for_other_ranks_is_refused(dry_runner, tmp_path):
    with pytest.raises(InputError, match="make 4 ranks, the probe is for 8"):
        dry_runner({}).start(spec_of(tmp_path, 8, data_parallel_shard_degree=4))


def test_the_file_of_a_rank_differs_in_what_a_dry_run_needs(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spec = spec_of(tmp_path, 8, **FSDP8)
    job, settings = job_from_text(spec.toml, name="job"), settings_of(8, **FSDP8)
    one = rank_spec(spec, job, settings, 0, "cuda")
    assert (one.world_size, one.settings.steps, one.settings.warmup_steps) == (1, 8, 2)
    written = job_from_text(one.toml, name="rank").values
    changed = {key for key in written if written[key] != job.values.get(key)}
    assert changed == {"comm.mode", "training.steps", "job.dump_folder"}
    # a rank of several on a node has one thread, as torchrun gives it
    told = {"TITAN_TUNE_DRY_RUN_RANK": "0", "NGPU": "8"}
    assert dict(one.environment) == {**told, "OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert dict(rank_spec(spec, job, settings, 0, "cuda").environment) == told
    assert dry_run_settings(spec.settings, "cpu").steps == 2


def test_outcomes_of_earlier_runs_are_kept(dry_runner, tmp_path):
    runner = dry_runner({})
    spec = spec_of(tmp_path, 8, **FSDP8)
    wait_for_outcome(runner.start(spec))
    wait_for_outcome(runner.start(spec))
    assert (spec.directory / "earlier1" / "outcome.json").exists()
    assert (spec.directory / "rank0" / "earlier1" / files.CONFIG).exists()
