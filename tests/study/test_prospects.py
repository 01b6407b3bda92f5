import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState, create_trial

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import MemoryEstimate, Verdict
from titan_tune.domain.probe import Measurement, ProbeOutcome, ProbeStatus
from titan_tune.probe.record import outcome_to_dict
from titan_tune.space.default import space_from_job
from titan_tune.study.plan import make_plan
from titan_tune.study.prospects import UNDER_PRESSURE, chance_of_fitting, pool_item, reading
from titan_tune.study.records import Attr
from titan_tune.study.sampler import Reading
from titan_tune.titan.job import job_from_text
from titan_tune.units import GIB

JOB = """
[model]
name = "llama3"
flavor = "8B"
[training]
seq_len = 8192
local_batch_size = 1
global_batch_size = 16
"""
OTHERS = {"activation_checkpoint": "full", "float8": "off", "local_batch_size": "1"}
MODES = ["off", "default", "reduce-overhead", "max-autotune"]


@pytest.fixture(scope="module")
def plan():
    cluster = ClusterSpec(gpu=gpu_spec("h100-80gb"), gpus_per_node=8)
    axes = {"compile": MODES, "parallelism": [{"dp_shard": 8}], "local_batch_size": [1, 2]}
    axes["float8"] = ["off", "rowwise"]
    return make_plan(space_from_job(job_from_text(JOB, name="job.toml"), cluster, axes=axes))


def memory(active, reserved, *, half_width=1.0, capacity=100.0):
    """All in GiB; 2 GiB lie outside the allocator."""
    low, high = active - half_width, active + half_width
    return MemoryEstimate(
        "formula", (), 0, active * GIB, (low * GIB, high * GIB), reserved * GIB, (reserved + 2) * GIB, 2 * GIB, {},
        capacity * GIB, Verdict.PRESSURE,
    )  # fmt: skip


def test_the_chance_is_high_where_all_fits_and_low_where_active_does_not():
    assert chance_of_fitting(memory(60.0, 70.0)) == pytest.approx(1.0)
    assert chance_of_fitting(memory(97.5, 104.0)) == pytest.approx(
        0.837 * (UNDER_PRESSURE + 0.5 * 0.5 / 6.5), abs=0.002
    )
    assert chance_of_fitting(memory(98.0, 104.0)) == pytest.approx(0.5 * UNDER_PRESSURE)
    assert chance_of_fitting(memory(101.0, 104.0)) < 0.001


@given(
    active=st.floats(50.0, 120.0),
    beyond=st.floats(0.0, 20.0),
    half=st.floats(0.0, 10.0),
    more=st.floats(0.0, 9.0),
)
def test_the_chance_falls_with_memory_and_grows_with_the_card(active, beyond, half, more):
    estimate = memory(active, active + beyond, half_width=half)
    chance = chance_of_fitting(estimate)
    assert 0.0 <= chance <= 1.0
    larger = memory(active, active + beyond, half_width=half, capacity=100.0 + more)
    assert chance_of_fitting(larger) >= chance - 1e-9
    heavier = memory(active + more, active + more + beyond, half_width=half)
    assert chance_of_fitting(heavier) <= chance + 1e-9


def test_candidates_that_fit_are_sure_and_those_under_pressure_are_not(plan):
    seen = set()
    for ranked in plan.pool:
        item = pool_item(ranked, plan)
        assert item.predicted == ranked.predicted_tokens_per_second
        seen.add(ranked.verdict)
        assert (item.success == 1.0) is (ranked.verdict is Verdict.FITS)
    assert seen == {Verdict.FITS, Verdict.PRESSURE}


def test_compile_modes_cost_what_they_cost(plan):
    seconds = {}
    for ranked in plan.pool:
        choices = ranked.candidate.choices
        if (
            choices["local_batch_size"] == "1"
            and choices["activation_checkpoint"] == "full"
            and choices["float8"] == "off"
        ):
            seconds[choices["compile"]] = pool_item(ranked, plan).seconds
    assert max(seconds, key=seconds.__getitem__) == "max-autotune"
    assert all(20.0 < value < 400.0 for value in seconds.values()) and set(seconds) == set(MODES)


def trial(outcome, state=TrialState.COMPLETE, **more):
    attrs = {Attr.CONFIG_ID: "c", Attr.DIRECTORY: "trials/c", Attr.OUTCOME: outcome_to_dict(outcome)}
    return create_trial(state=state, user_attrs=attrs, **more)


def test_a_finished_probe_tells_its_duration_and_noise():
    measurement = Measurement(100.0, (98.04, 101.96), 1.0, 10, 2, False, 5.0, (1.0,), (), 0)
    found = reading(trial(ProbeOutcome(ProbeStatus.COMPLETED, "", 31.0, measurement), value=100.0))
    assert found.seconds == 31.0 and found.noise == pytest.approx(0.01)


def test_a_failed_probe_tells_its_duration_and_a_trial_without_one_nothing():
    failed = trial(ProbeOutcome(ProbeStatus.OOM, "", 28.0), state=TrialState.FAIL)
    assert reading(failed) == Reading(28.0, 0.0)
    assert reading(create_trial(state=TrialState.FAIL)) == Reading()
