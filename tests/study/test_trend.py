"""Trend checks, on plain values: which verdict from which figures, and which checks concern a configuration at all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.export.small_studies import info, measurement
from titan_tune.domain.probe import ProbeOutcome, ProbeStatus
from titan_tune.study.records import Role, TrialRecord
from titan_tune.study.selection import Standing
from titan_tune.study.trend import (
    FLOAT8,
    Check,
    Grade,
    problems,
    standing_checks,
    study_checks,
    trend_checks,
    worst_grade,
)

BASE = tuple(12.0 - 0.1 * step + 0.02 * (-1) ** step for step in range(20))
SOUND = {
    "step_jitter": 0.01, "slow_steps": 0, "recompilations": 0, "late_compilations": 0, "graph_breaks": 0,
    "alloc_retries": 0, "late_alloc_retries": 0, "ooms": 0, "grad_norm_first": 4.0, "grad_norm_last": 1.0,
    "grad_norm_max": 5.0, "not_finite": False, "float8_linear_modules": 0, "linear_modules": 225,
    "fused_collective_matmuls": None,
}  # fmt: skip


def record(
    number: int,
    *,
    losses: tuple[float, ...] = BASE,
    role: Role = Role.PROBE,
    values: dict[str, Any] | None = None,
    predicted_gib: float | None = 40.0,
    trend: dict[str, Any] | None = None,
    status: ProbeStatus = ProbeStatus.COMPLETED,
    **measured: Any,
) -> TrialRecord:
    details = {"trend": SOUND | trend} if trend is not None else {}
    return TrialRecord(
        number=number,
        config_id=f"c{number}",
        role=role,
        choices={},
        values=values or {},
        directory=Path("trials"),
        outcome=ProbeOutcome(status, "", 60.0, measurement(7000.0, losses=losses, **measured), details),
        predicted={} if predicted_gib is None else {"active_gib": predicted_gib},
    )


BASELINE = record(0, role=Role.BASELINE)


def checks(found: TrialRecord, **changes: Any) -> dict[str, Check]:
    return {check.name: check for check in trend_checks(found, info(**changes), baseline=BASELINE)}


def test_a_sound_probe_is_ok_throughout():
    found = checks(record(1, trend={}))
    assert set(found) == {"loss", "gradient norm", "peak memory", "step time", "allocator"}
    assert {check.grade for check in found.values()} == {Grade.OK}
    assert problems(found.values()) == ()


def test_a_probe_that_measured_nothing_has_no_checks():
    assert trend_checks(record(1, status=ProbeStatus.OOM), info()) == ()


def test_an_older_record_without_figures_is_checked_by_what_it_has():
    found = checks(record(1))
    assert set(found) == {"loss", "peak memory", "allocator"}


@pytest.mark.parametrize(
    ("factor", "grade"),
    [(1.0, Grade.OK), (1.005, Grade.OK), (0.995, Grade.OK), (1.02, Grade.WARN), (0.98, Grade.WARN), (1.08, Grade.FAIL)],
)  # fmt: skip
def test_the_loss_is_compared_step_by_step(factor, grade):
    check = checks(record(1, losses=tuple(factor * loss for loss in BASE)))["loss"]
    assert check.grade is grade
    assert check.numbers["relative_gap"] == pytest.approx(factor - 1.0, abs=1e-9)
    assert check.numbers["steps"] == 20


def test_noise_that_both_runs_share_does_not_count():
    """The baseline's own steps differ by 0.04: unpaired, a gap of 0.3 % would drown in it."""
    check = checks(record(1, losses=tuple(1.003 * loss for loss in BASE)))["loss"]
    assert check.numbers["noise"] < 0.001 < check.numbers["gap"]


def test_a_gap_within_the_noise_of_the_differences_is_no_warning():
    noisy = tuple(loss * (1.015 if step % 2 else 0.99) for step, loss in enumerate(BASE))
    assert checks(record(1, losses=noisy))["loss"].grade is Grade.OK


def test_growth_of_the_gap_is_told():
    drifting = tuple(loss * (1.0 + 0.001 * step) for step, loss in enumerate(BASE))
    check = checks(record(1, losses=drifting))["loss"]
    assert check.grade is Grade.WARN
    assert check.numbers["relative_growth"] == pytest.approx(0.01, rel=0.2)


def test_a_loss_that_is_not_finite_fails_even_without_a_baseline():
    lost = replace(BASELINE, outcome=record(0, losses=(12.0, math.nan)).outcome)
    assert checks(lost)["loss"].grade is Grade.FAIL


def test_the_baseline_is_not_compared_with_itself():
    assert "loss" not in checks(BASELINE)


def test_a_probe_of_too_few_steps_is_not_compared():
    assert "loss" not in checks(record(1, losses=BASE[:4]))


def test_other_tokens_are_compared_less_strictly_and_say_so():
    off = record(1, losses=tuple(1.02 * loss for loss in BASE))
    check = checks(off, probe={"data": "job"})["loss"]
    assert check.grade is Grade.OK and "not on the same tokens" in check.text


@pytest.mark.parametrize(
    ("predicted", "grade"),
    [
        (40.0, Grade.OK),
        (39.5, Grade.OK),
        (38.0, Grade.WARN),
        (42.0, Grade.WARN),
        (33.0, Grade.FAIL),
        (60.0, Grade.FAIL),
    ],
)
def test_peak_memory_against_the_estimate(predicted, grade):
    check = checks(record(1, predicted_gib=predicted))["peak memory"]
    assert check.grade is grade and check.numbers["measured_gib"] == 40.0


def test_memory_of_cpu_processes_and_unpredicted_models_is_not_compared():
    assert "peak memory" not in checks(record(1, memory_kind="rss"))
    assert "peak memory" not in checks(record(1, predicted_gib=None))


@pytest.mark.parametrize(
    ("name", "figures", "values", "grade"),
    [
        ("step time", {"step_jitter": 0.12}, {}, Grade.WARN),
        ("step time", {"step_jitter": 0.08}, {}, Grade.OK),
        ("step time", {"step_jitter": 0.3}, {}, Grade.FAIL),
        ("step time", {"slow_steps": 1}, {}, Grade.WARN),
        ("gradient norm", {"grad_norm_max": 41.0}, {}, Grade.WARN),
        ("gradient norm", {"not_finite": True}, {}, Grade.FAIL),
        ("allocator", {"alloc_retries": 2}, {}, Grade.WARN),
        ("allocator", {"alloc_retries": 2, "late_alloc_retries": 1}, {}, Grade.FAIL),
        ("allocator", {"ooms": 1}, {}, Grade.FAIL),
        ("compile", {}, {"compile.enable": True}, Grade.OK),
        ("compile", {"late_compilations": 1, "recompilations": 1}, {"compile.enable": True}, Grade.WARN),
        ("compile", {"late_compilations": 8, "recompilations": 8}, {"compile.enable": True}, Grade.FAIL),
        ("float8", {"float8_linear_modules": 224, "linear_modules": 1}, {"model.converters": [FLOAT8]}, Grade.OK),
        ("float8", {"float8_linear_modules": 32, "linear_modules": 193}, {"model.converters": [FLOAT8]}, Grade.WARN),
        ("float8", {"float8_linear_modules": 0}, {"model.converters": [FLOAT8]}, Grade.FAIL),
    ],
)  # fmt: skip
def test_figures_of_the_ranks(name, figures, values, grade):
    check = checks(record(1, trend=figures, values=values))[name]
    assert check.grade is grade
    assert "\n" not in check.text and not check.text.endswith(".")


@pytest.mark.parametrize(("fused", "grade"), [(0, Grade.FAIL), (640, Grade.OK)])
def test_async_tensor_parallelism_has_to_have_fused_something(fused, grade):
    asked = {"parallelism.enable_async_tensor_parallel": True, "parallelism.tensor_parallel_degree": 2}
    found = checks(record(1, trend={"fused_collective_matmuls": fused}, values=asked))
    assert found["async TP"].grade is grade
    without = asked | {"parallelism.tensor_parallel_degree": 1}
    assert "async TP" not in checks(record(1, trend={"fused_collective_matmuls": fused}, values=without))


def test_a_configuration_has_the_worst_of_the_runs_that_count():
    early = record(1, trend={"step_jitter": 0.3})
    final = [
        replace(record(number, role=Role.FINALIST, trend={"step_jitter": jitter}), config_id="c1")
        for number, jitter in ((2, 0.01), (3, 0.12))
    ]
    found = study_checks(info(), [BASELINE, early, *final])
    assert set(found) == {0, 1, 2, 3}
    standing = Standing("c1", (early, *final), final=True)
    kept = {check.name: check.grade for check in standing_checks(standing, found)}
    assert kept["step time"] is Grade.WARN
    assert worst_grade(standing_checks(standing, found)) is Grade.WARN


def test_failures_come_first():
    found = checks(record(1, trend={"step_jitter": 0.12, "ooms": 1}))
    assert [line.split(":")[0] for line in problems(found.values())] == ["fail", "warn"]
    assert worst_grade(()) is Grade.OK


@given(
    losses=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30),
    base=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30),
    jitter=st.none() | st.floats(0, 10),
)
def test_any_figures_get_a_verdict(losses, base, jitter):
    odd = record(1, losses=tuple(losses), trend={"step_jitter": jitter})
    baseline = record(0, role=Role.BASELINE, losses=tuple(base))
    for check in trend_checks(odd, info(), baseline=baseline):
        assert check.grade in Grade and check.text
