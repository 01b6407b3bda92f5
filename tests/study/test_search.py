"""The search loop over the real storage, with known outcomes in place of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import (
    Measurement,
    ProbeOutcome,
    ProbeSettings,
    ProbeSpec,
    ProbeStatus,
    RankMemory,
)
from titan_tune.errors import (
    InputError,
    InterruptedSearchError,
    NothingFeasibleError,
    ProbesFailedError,
    StorageError,
)
from titan_tune.probe.record import write_outcome
from titan_tune.probe.replay import ReplayRunner
from titan_tune.space.axes import Budget
from titan_tune.space.default import space_from_job
from titan_tune.study import choose, outage, storage
from titan_tune.study.choose import make_sampler
from titan_tune.study.info import join, new_info
from titan_tune.study.ledger import Ledger
from titan_tune.study.plan import make_plan
from titan_tune.study.records import Attr, Role, records_of
from titan_tune.study.search import Pace, Search
from titan_tune.study.selection import winner
from titan_tune.titan.job import job_from_text

JOB = """
[model]
name = "llama3"
flavor = "8B"
[training]
seq_len = 4096
local_batch_size = 1
global_batch_size = 16
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


class Quiet:
    def __init__(self):
        self.notes, self.lines, self.snapshots = [], [], []

    def update(self, snapshot):
        self.snapshots.append(snapshot)

    def finished(self, record, label):
        self.lines.append((record, label))

    def note(self, text):
        self.notes.append(text)


def measured(tps: float, seconds: float = 30.0, losses=(2.0, 1.9)) -> ProbeOutcome:
    memory = (RankMemory(0, 10, 11, 12),)
    return ProbeOutcome(
        ProbeStatus.COMPLETED,
        "",
        seconds,
        Measurement(tps, (0.99 * tps, 1.01 * tps), 1.0, 10, 2, False, 9.0, losses, memory, 0),
    )


def failed(status: ProbeStatus, message: str = "no") -> ProbeOutcome:
    return ProbeOutcome(status, message, 5.0)


def truth(plan):
    """Measured = predicted with a twist: compile is worth less than the model thinks."""

    def outcome(spec: ProbeSpec) -> ProbeOutcome:
        ranked = plan.by_id[spec.config_id]
        factor = 0.9 if ranked.candidate.choices.get("compile") == "default" else 1.0
        return measured(factor * ranked.predicted_tokens_per_second)

    return outcome


def alike(plan):
    """All within two percent, the later in the pool the faster: every one of them may still win."""
    place = {item.candidate.config_id: i for i, item in enumerate(plan.pool)}
    place[plan.baseline.candidate.config_id] = -1

    def outcome(spec: ProbeSpec) -> ProbeOutcome:
        return measured(8000.0 * (1.0 + 0.02 * place.get(spec.config_id, 0) / len(place)))

    return outcome


def small_plan(*, gpu="h200", budget=None, axes=None, gpus=8, job=JOB, probe=None):
    cluster = ClusterSpec(gpu=gpu_spec(gpu), gpus_per_node=gpus)
    axes = axes or {"parallelism": [{"dp_shard": 8}, {"dp_shard": 4, "tp": 2}], "local_batch_size": [1, 2]}
    return make_plan(
        space_from_job(
            job_from_text(job, name="job.toml"),
            cluster,
            axes=axes,
            budget=budget,
            probe=probe or ProbeSettings(),
        )
    )


PACE = Pace(poll=0.0, watch=0.0)


class Bench:
    """One study in a folder; every ``run`` is a new process's view of it."""

    def __init__(self, folder: Path, plan):
        self.folder, self.plan = folder, plan
        self.url = storage.storage_url(folder, None)
        self.view = Quiet()

    def study(self):
        return storage.create_or_load("s", self.url, sampler=make_sampler(self.plan))

    def records(self):
        return records_of(self.study())

    def run(self, outcome_of, *, slots=1, polls=0, plan=None, pace=PACE):
        self.plan = plan or self.plan
        self.runner = ReplayRunner(outcome_of, slots=slots, polls=polls)
        sampler = make_sampler(self.plan)
        study = storage.create_or_load("s", self.url, sampler=sampler)
        search = Search(
            self.plan, study, sampler, self.runner, self.folder, self.view,
            url=self.url, device="cuda", pace=pace,
        )  # fmt: skip
        return search.run()


@pytest.fixture
def no_early_end(monkeypatch):
    """Explore until the budget ends, whatever the proposer expects."""
    monkeypatch.setattr(choose, "MIN_EXPECTED_GAIN", -1.0)


@pytest.fixture
def bench(tmp_path, no_early_end):
    return Bench(tmp_path, small_plan(budget=Budget(max_probes=12)))


def test_baseline_first_then_exploring_then_interleaved_finals(bench):
    reason = bench.run(alike(bench.plan))
    records = bench.records()
    assert reason == "budget of 12 probes"
    assert [r.role for r in records] == [Role.BASELINE] + [Role.PROBE] * 7 + [Role.FINALIST] * 4
    assert records[8].config_id == records[0].config_id
    explored = [r.config_id for r in records[:8]]
    assert len(set(explored)) == 8
    best = winner(records)
    assert best.standing.final and best.gain > 0
    assert {line[0].number for line in bench.view.lines} == set(range(12))


def test_finds_the_best_candidate_of_the_pool(tmp_path):
    bench = Bench(tmp_path, small_plan(budget=Budget(max_probes=12)))
    outcome_of = truth(bench.plan)
    bench.run(outcome_of)
    specs = [replace(bench.runner.started[0], config_id=r.candidate.config_id) for r in bench.plan.pool]
    best = max(outcome_of(spec).measurement.tokens_per_second_per_gpu for spec in specs)
    assert winner(bench.records()).standing.tokens_per_second >= 0.99 * best


def test_nothing_infeasible_is_started_and_everything_started_is_in_the_plan(bench):
    bench.run(alike(bench.plan))
    assert {spec.config_id for spec in bench.runner.started} <= set(bench.plan.by_id)


def test_trials_carry_attributes_and_constraints(bench):
    bench.run(alike(bench.plan))
    for trial in bench.study().get_trials():
        assert trial.state is TrialState.COMPLETE
        assert trial.constraints == {"memory": pytest.approx(-bench.plan.space.cluster.gpu.memory_gib)}
        attrs = trial.user_attrs
        assert (bench.folder / attrs[Attr.DIRECTORY]).is_dir()
        assert attrs[Attr.PREDICTED]["active_gib"] > 0
    repeated = [
        t for t in bench.study().get_trials() if t.user_attrs[Attr.CONFIG_ID] == bench.records()[0].config_id
    ]
    assert [Path(t.user_attrs[Attr.DIRECTORY]).name[12:] for t in repeated] == ["", "-2"]


def test_the_probe_runs_the_candidates_toml_with_the_global_batch_held(bench):
    bench.run(alike(bench.plan))
    for spec in bench.runner.started:
        job = job_from_text(spec.toml, name="probe")
        assert job.get("training.global_batch_size") in (16, -1)
        assert spec.tokens_per_step_per_rank == 16 * 4096 / 8
        assert job.get("training.steps") == bench.plan.space.probe.steps


def test_the_baselines_losses_go_to_every_later_probe(bench):
    bench.run(alike(bench.plan))
    assert bench.runner.started[0].baseline_losses == ()
    assert all(spec.baseline_losses == (2.0, 1.9) for spec in bench.runner.started[1:])


def test_the_same_search_again_runs_nothing_twice(bench):
    bench.run(alike(bench.plan))
    before = [(r.number, r.config_id) for r in bench.records()]
    bench.run(alike(bench.plan))
    assert bench.runner.started == []
    assert [(r.number, r.config_id) for r in bench.records()] == before


def test_a_larger_budget_goes_on_where_it_stopped(bench):
    bench.run(alike(bench.plan))
    explored = {r.config_id for r in bench.records() if r.role is not Role.FINALIST}
    bench.run(alike(bench.plan), plan=small_plan(budget=Budget(max_probes=20)))
    new = [r.config_id for r in bench.records() if r.number >= 12 and r.role is Role.PROBE]
    assert new and not explored & set(new)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the search's own clean-up may matter."""


@pytest.mark.parametrize("moment", [1, 2, 5, 8])
def test_killed_at_any_probe_and_resumed_loses_and_repeats_nothing(bench, moment):
    outcome_of, count = alike(bench.plan), 0

    def dies(spec):
        nonlocal count
        count += 1
        if count == moment:
            raise Killed
        return outcome_of(spec)

    with pytest.raises(Killed):
        bench.run(dies)
    done = [r.config_id for r in bench.records()]
    assert len(done) == moment - 1
    bench.run(outcome_of)
    records = bench.records()
    finished = [r for r in records if r.measurement]
    assert [r.config_id for r in finished[: moment - 1]] == done
    explored = [r.config_id for r in finished if r.role is not Role.FINALIST]
    assert len(explored) == len(set(explored)) == 8
    assert sum(r.outcome.status is ProbeStatus.CANCELLED for r in records) == 1
    assert not [t for t in bench.study().get_trials() if not t.state.is_finished()]


def test_a_result_on_disk_that_was_never_told_is_adopted(bench):
    outcome_of = alike(bench.plan)

    def writes_and_dies(spec):
        write_outcome(spec.directory, outcome_of(spec))
        raise Killed

    with pytest.raises(Killed):
        bench.run(writes_and_dies)
    bench.run(outcome_of)
    records = bench.records()
    assert records[0].role is Role.BASELINE and records[0].measurement
    assert sum(r.config_id == records[0].config_id and r.role is Role.BASELINE for r in records) == 1


def test_ctrl_c_cancels_saves_and_resumes(bench):
    outcome_of, polls = alike(bench.plan), 0
    original = Search._advance

    def interrupted(self):
        nonlocal polls
        polls += 1
        if polls == 10:
            raise KeyboardInterrupt
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "_advance", interrupted)
        with pytest.raises(InterruptedSearchError, match="the same command resumes"):
            bench.run(outcome_of, polls=2)
    statuses = [r.outcome.status for r in bench.records()]
    assert statuses.count(ProbeStatus.CANCELLED) == 1 and statuses.count(ProbeStatus.COMPLETED) >= 1
    bench.run(outcome_of)
    assert winner(bench.records()).standing.final


def test_failures_are_told_and_not_repeated(bench):
    plan = bench.plan
    bad = {r.candidate.config_id for r in plan.pool[:4]}

    def outcome(spec):
        return failed(ProbeStatus.OOM) if spec.config_id in bad else alike(plan)(spec)

    bench.run(outcome)
    started = [spec.config_id for spec in bench.runner.started]
    assert any(config in bad for config in started)
    assert all(started.count(config) == 1 for config in bad if config in started)
    states = {t.state for t in bench.study().get_trials() if t.user_attrs[Attr.CONFIG_ID] in bad}
    assert states == {TrialState.FAIL}
    assert winner(bench.records()).standing.config_id not in bad


def test_infrastructure_is_tried_again_and_never_held_against_a_configuration(bench):
    outcome_of, first = alike(bench.plan), {}

    def flaky(spec):
        seen = first.setdefault(spec.config_id, 0)
        first[spec.config_id] += 1
        return failed(ProbeStatus.INFRASTRUCTURE) if seen == 0 and len(first) == 3 else outcome_of(spec)

    bench.run(flaky)
    flaky_id = next(r.config_id for r in bench.records() if r.outcome.status is ProbeStatus.INFRASTRUCTURE)
    assert any(r.measurement for r in bench.records() if r.config_id == flaky_id)


def test_three_infrastructure_failures_in_a_row_end_the_search_with_the_log(bench):
    with pytest.raises(ProbesFailedError, match=r"3 probes in a row could not run: no \(see .*stdout\.log\)"):
        bench.run(lambda spec: failed(ProbeStatus.INFRASTRUCTURE))
    assert len(bench.runner.started) == 3


def test_no_measurement_at_all_is_exit_code_4(bench):
    with pytest.raises(ProbesFailedError, match="none of 10 probes was measured") as caught:
        bench.run(lambda spec: failed(ProbeStatus.UNSUPPORTED, "torchtitan says no"))
    assert caught.value.exit_code == 4 and "torchtitan says no" in str(caught.value)


def test_a_failing_baseline_does_not_stop_the_search(bench):
    base = bench.plan.baseline.candidate.config_id

    def outcome(spec):
        return failed(ProbeStatus.OOM) if spec.config_id == base else alike(bench.plan)(spec)

    bench.run(outcome)
    best = winner(bench.records())
    assert best.baseline is None and best.gain is None


def test_gpu_hours_hold(tmp_path, no_early_end):
    plan = small_plan(budget=Budget(max_gpu_hours=0.8))
    bench = Bench(tmp_path, plan)
    assert bench.run(alike(plan)) == "budget of 0.8 GPU-hours"
    spent = sum(r.outcome.seconds for r in bench.records()) * 8 / 3600
    assert 0.6 < spent <= 0.8
    assert [r.role for r in bench.records()][-4:] == [Role.FINALIST] * 4


def test_a_probe_that_the_budget_cuts_is_nobodys_fault(tmp_path, no_early_end):
    plan = small_plan(budget=Budget(max_gpu_hours=0.8))
    bench = Bench(tmp_path, plan)
    limits = []

    def outcome(spec):
        limits.append(spec.settings.timeout_seconds)
        return failed(ProbeStatus.TIMEOUT, "360 s") if len(limits) == 3 else alike(plan)(spec)

    bench.run(outcome)
    assert limits[0] == pytest.approx(360.0) and limits[1] == pytest.approx(330.0)
    third = bench.records()[2]
    assert third.outcome.status is ProbeStatus.CANCELLED and "budget ended" in third.outcome.message


def test_parallel_slots_keep_the_budget_and_run_nothing_twice(bench):
    bench.run(alike(bench.plan), slots=3, polls=2)
    records = bench.records()
    assert len(records) == 12
    explored = [r.config_id for r in records if r.role is not Role.FINALIST]
    assert len(explored) == len(set(explored))
    assert max(len(s.running) for s in bench.view.snapshots) == 3
    assert {s.stage for s in bench.view.snapshots} == {"baseline", "exploring", "finals"}


def test_a_study_refuses_another_space(bench):
    study = bench.study()
    join(study, new_info(bench.plan, device="cuda", environment={}))
    join(study, new_info(small_plan(budget=Budget(max_probes=99)), device="cuda", environment={}))
    other = small_plan(axes={"local_batch_size": [1]})
    with pytest.raises(
        InputError, match="different axes; its measurements do not compare: choose another --study"
    ):
        join(study, new_info(other, device="cuda", environment={}))


@pytest.mark.parametrize("call", ["tell", "claim", "refresh"])
def test_a_storage_that_fails_for_a_moment_loses_and_doubles_nothing(bench, monkeypatch, call):
    real, calls = getattr(Ledger, call), 0

    def fails_sometimes(self, *args):
        nonlocal calls
        calls += 1
        if calls in (4, 9, 10):
            raise StorageError("down")
        return real(self, *args)

    monkeypatch.setattr(Ledger, call, fails_sometimes)
    monkeypatch.setattr(outage, "FIRST_DELAY_SECONDS", 0.0)
    bench.run(alike(bench.plan))
    explored = [r.config_id for r in bench.records() if r.role is not Role.FINALIST]
    assert len(explored) == len(set(explored)) == 8
    assert len(bench.records()) == len(bench.runner.started) == 12
    assert all(r.measurement for r in bench.records())
    assert sum("storage unreachable" in note for note in bench.view.notes) == 2
    assert sum("the storage is back" in note for note in bench.view.notes) == 2


def test_a_write_that_took_place_and_still_failed_is_not_done_twice(bench, monkeypatch):
    """The connection breaks after the commit and before its answer."""
    monkeypatch.setattr(outage, "FIRST_DELAY_SECONDS", 0.0)
    for call, at in (("add_trial", 3), ("tell", 5)):
        real, calls = getattr(optuna.Study, call), [0]

        def breaks(self, *args, real=real, calls=calls, at=at, **kwargs):
            result = real(self, *args, **kwargs)
            calls[0] += 1
            if calls[0] == at:
                raise optuna.exceptions.StorageInternalError("connection lost")
            return result

        monkeypatch.setattr(optuna.Study, call, breaks)
    bench.run(alike(bench.plan))
    records = bench.records()
    assert len(records) == len(bench.runner.started) == 12 and all(r.measurement for r in records)
    trials = bench.study().get_trials()
    assert len(trials) == 13 and sum(Attr.WITHDRAWN in t.user_attrs for t in trials) == 1


def test_a_storage_that_stays_away_ends_the_search_and_the_next_one_tells(bench, monkeypatch):
    def away(self, *args):
        raise StorageError("down")

    monkeypatch.setattr(outage, "FIRST_DELAY_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "tell", away)
        with pytest.raises(
            StorageError, match=r"down; not back within .*: 1 result kept in .*, told by the same command"
        ):
            bench.run(alike(bench.plan), pace=Pace(poll=0.0, watch=0.0, patience=0.0))
    assert bench.records() == ()
    bench.run(alike(bench.plan))
    assert len(bench.records()) == 12 and len(bench.runner.started) == 11
    assert all(r.measurement for r in bench.records())


def test_exploring_probes_know_what_to_beat_and_the_others_do_not(bench):
    bench.run(alike(bench.plan))
    best = 0.0
    for spec, record in zip(bench.runner.started, bench.records(), strict=True):
        assert spec.beat == (pytest.approx(0.98 * best) if record.role is Role.PROBE else None)
        best = max(best, record.measurement.interval[0])


def test_nothing_feasible_says_what_binds():
    with pytest.raises(NothingFeasibleError) as caught:
        small_plan(gpu="a100-40gb", gpus=1, axes={"activation_checkpoint": ["full"], "local_batch_size": [1]})
    assert caught.value.exit_code == 3
    assert "does-not-fit rejects" in str(caught.value) and "GiB" in str(caught.value)
