"""What is known of a candidate before its probe: how fast it should be, whether it runs, how long the probe takes."""

from __future__ import annotations

import statistics

from optuna.trial import FrozenTrial

from titan_tune.domain.estimate import MemoryEstimate, Verdict
from titan_tune.domain.probe import ProbeSettings
from titan_tune.domain.settings import CompileMode, Settings
from titan_tune.study.plan import Plan, Ranked
from titan_tune.study.pool import DEFAULT_SECONDS, PoolItem
from titan_tune.study.records import record_of
from titan_tune.study.sampler import Reading

INTERVAL_SDS = 1.96
"""Half the memory interval, in standard deviations: it is read as a 95 % interval."""
UNDER_PRESSURE = 0.5
"""Chance to run where active memory fits and nothing of what is reserved beyond it does: a guess, no run says."""
START_SECONDS = 25.0
"""Launch, imports, process group, model and the end of all processes; seen on H200."""
COMPILE_SECONDS = {
    CompileMode.DEFAULT: 20.0,
    CompileMode.REDUCE_OVERHEAD: 25.0,
    CompileMode.MAX_AUTOTUNE: 120.0,
}
"""By mode; only their order of magnitude counts, since probes correct them."""


def pool_item(ranked: Ranked, plan: Plan) -> PoolItem:
    """A plan's entry as the proposer sees it."""
    pressed = ranked.verdict is Verdict.PRESSURE and ranked.memory is not None
    return PoolItem(
        config_id=ranked.candidate.config_id,
        choices=ranked.candidate.choices,
        predicted=ranked.predicted_tokens_per_second,
        success=chance_of_fitting(ranked.memory) if pressed and ranked.memory else 1.0,
        seconds=probe_seconds(ranked, plan),
    )


def chance_of_fitting(memory: MemoryEstimate) -> float:
    """Chance that a configuration runs on its card.

    Active memory has to fit: its interval says how likely that is. The allocator reserves more, and goes without
    where it must, at the price of retries: the less of that fits, the less likely it is to run.
    """
    room = memory.capacity_bytes - memory.outside_bytes
    low, high = memory.active_interval
    sd = max((high - low) / (2 * INTERVAL_SDS), 1.0)
    fits = statistics.NormalDist(memory.active_bytes, sd).cdf(room)
    beyond = max(memory.reserved_bytes, high) - memory.active_bytes
    share = min(1.0, max(0.0, (room - memory.active_bytes) / beyond)) if beyond > 0.0 else 1.0
    return fits * (UNDER_PRESSURE + (1.0 - UNDER_PRESSURE) * share)


def probe_seconds(ranked: Ranked, plan: Plan) -> float:
    """First guess of how long a probe takes: start, compilation and its steps."""
    settings, speed = ranked.candidate.settings, ranked.outlook.tokens_per_second_per_gpu
    if speed is None:
        return DEFAULT_SECONDS + _compile_seconds(settings)
    tokens = plan.space.global_batch_size * settings.seq_len / settings.dims.world_size
    return START_SECONDS + _compile_seconds(settings) + _expected_steps(plan.space.probe) * tokens / speed


def _compile_seconds(settings: Settings) -> float:
    compilation = settings.compile
    if not (compilation.model or compilation.loss):
        return 0.0
    mode = compilation.mode
    if mode is CompileMode.MAX_AUTOTUNE_NO_CUDAGRAPHS:
        mode = CompileMode.MAX_AUTOTUNE
    return COMPILE_SECONDS[mode]


def _expected_steps(probe: ProbeSettings) -> float:
    """Halfway between the first step at which a probe may stop and its last."""
    return (min(probe.warmup_steps + probe.min_measured_steps, probe.steps) + probe.steps) / 2


def reading(trial: FrozenTrial) -> Reading:
    """What a trial's probe tells besides its throughput."""
    record = record_of(trial)
    if record is None:
        return Reading()
    measurement = record.measurement
    noise = 0.0
    if measurement is not None:
        low, high = measurement.interval
        noise = (high - low) / (2 * INTERVAL_SDS) / measurement.tokens_per_second_per_gpu
    return Reading(record.outcome.seconds if record.outcome.seconds > 0.0 else None, noise)
