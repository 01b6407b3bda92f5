"""What the ranks of a running probe have written so far, and whether that is reason to end it."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from titan_tune.domain.probe import Measurement, ProbeSettings, ProbeSpec
from titan_tune.probe import files, measurement
from titan_tune.probe.classify import Evidence, StopReason
from titan_tune.probe.statistics import cannot_win, is_tight, measured

FINISH_SECONDS: Final = 30.0
"""How long processes may take to end after their last step (torchtitan's rank 0 sleeps 2 s)."""


class Findings(NamedTuple):
    """What the ranks' files come to once the run is over."""

    measurement: Measurement | None
    details: Mapping[str, Any]
    """``trend`` and ``phases``, where there is anything to say."""
    warnings: tuple[str, ...]


@dataclass(slots=True)
class Watch:
    """One run of a probe, whoever launched it. Times are monotonic."""

    metrics: files.Metrics
    steps_seen: int = 0
    """Complete on every rank."""
    last_step: float = 0.0
    """When the last of them was seen."""
    tokens_per_second: float | None = None
    """Per GPU, of the last step."""
    tight: bool = False
    """The interval of the median is as narrow as asked for."""
    cannot_win: bool = False
    """What was measured cannot reach ``ProbeSpec.beat`` any more."""

    def read_new(self, spec: ProbeSpec) -> bool:
        """Take in what was written since the last call; whether anything was."""
        grown = self.metrics.read_new()
        steps = self.metrics.complete_steps(spec.world_size)
        if steps > self.steps_seen:
            self.steps_seen, self.last_step = steps, time.monotonic()
            records = self.metrics.slowest(spec.world_size)
            kept = measurement.throughputs(spec, measured(records, spec.settings.warmup_steps))
            self.tokens_per_second = measurement.throughputs(spec, records)[-1]
            self.cannot_win = cannot_win(kept, spec.beat)
            self.tight = is_tight(
                kept,
                minimum=spec.settings.min_measured_steps,
                target_relative_interval=spec.settings.target_relative_interval,
            )
        return grown

    def reason_to_stop(self, settings: ProbeSettings, *, began: float, all_ended: bool) -> StopReason | None:
        """Why the run should end now. ``began`` is its start; once every step is there it is given
        ``FINISH_SECONDS`` to end by itself, none where ``all_ended``: the ranks wrote their last line."""
        now = time.monotonic()
        if self.metrics.has_diverged():
            return StopReason.DIVERGED
        if self.steps_seen >= settings.steps:
            return StopReason.FINISHED if all_ended or now - self.last_step > FINISH_SECONDS else None
        if self.tight:
            return StopReason.EARLY
        if self.cannot_win:
            return StopReason.CANNOT_WIN
        if now - began > settings.timeout_seconds:
            return StopReason.TIMEOUT
        if self.steps_seen == 0:
            return StopReason.STARTUP if now - began > settings.startup_seconds else None
        return StopReason.HANG if now - self.last_step > settings.hang_seconds else None

    def evidence(
        self,
        spec: ProbeSpec,
        *,
        stop: StopReason | None,
        stop_time: float,
        returncode: int | None = None,
        host_oom_kills: int = 0,
        facts: Mapping[str, Any] | None = None,
    ) -> Evidence:
        """All that the ranks left, with what the launcher knows beside it. ``stop_time`` is Unix time."""
        return Evidence(
            settings=spec.settings,
            returncode=returncode,
            complete_steps=self.metrics.complete_steps(spec.world_size),
            losses=self.metrics.losses(),
            diverged=self.metrics.has_diverged(),
            errors=files.read_errors(spec.directory),
            log_tail=files.log_tail(spec.directory),
            stop=stop,
            stop_time=stop_time,
            baseline_losses=spec.baseline_losses,
            host_oom_kills=host_oom_kills,
            facts={**(facts or {}), **measurement.facts(self.metrics)},
        )

    def findings(
        self, spec: ProbeSpec, *, launched: float | None, ended: float, stop: StopReason | None
    ) -> Findings:
        """Measurement, details and warnings. Unix times; ``launched`` is ``None`` where it never ran."""
        details: dict[str, Any] = {"trend": measurement.trend(spec, self.metrics)}
        measured_here = None
        if launched is not None:
            details["phases"] = measurement.phases(self.metrics, launched=launched, ended=ended)
            measured_here = measurement.measurement_of(
                spec,
                self.metrics,
                launched=launched,
                stopped_early=stop in (StopReason.EARLY, StopReason.CANNOT_WIN),
            )
        wants_float8, wants_compile = measurement.asks_for(tomllib.loads(spec.toml))
        warnings = measurement.silent_failures(
            self.metrics, wants_float8=wants_float8, wants_compile=wants_compile
        )
        return Findings(measured_here, {name: fact for name, fact in details.items() if fact}, warnings)
