"""Probes on this machine: torchrun under a warden, watched through the ranks' metrics files."""

from __future__ import annotations

import os
import shutil
import time
import tomllib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from titan_tune.domain.probe import ProbeOutcome, ProbeProgress, ProbeSpec, ProbeStatus
from titan_tune.errors import InputError
from titan_tune.probe import files, measurement, processes
from titan_tune.probe.classify import Classification, Evidence, StopReason, classify
from titan_tune.probe.launch import (
    command_text,
    environment_record,
    probe_environment,
    torchrun_command,
    training_arguments,
)
from titan_tune.probe.preload.launcher import PreloadedLauncher
from titan_tune.probe.record import write_outcome, write_whole
from titan_tune.probe.statistics import cannot_win, is_tight, measured

FINISH_SECONDS: Final = 30.0
"""How long to wait for the ranks' last words after their last step. When all have spoken they are stopped at once:
what follows in torchtitan is a sleep of 2 s and the teardown, which tell nothing."""

LAUNCHERS: Final = ("preloaded", "torchrun")

CommandBuilder = Callable[[ProbeSpec], Sequence[str]]


class LocalRunner:
    """Runs one probe at a time on the ``nproc`` devices of this machine; a context manager."""

    name = "local"
    slots = 1

    def __init__(
        self,
        nproc: int,
        device: str,
        *,
        grace_seconds: float = 10.0,
        command: CommandBuilder = torchrun_command,
        launcher: str | None = None,
    ) -> None:
        """``device`` is cuda or cpu. ``grace_seconds`` is how long torchrun may take to end its workers
        before they are killed. ``command`` builds what is launched for a spec. ``launcher`` is torchrun or
        preloaded (``ProbeSettings.launcher``, where ``None`` leaves it); ``command`` is then for when that fails.
        """
        if device not in ("cuda", "cpu"):
            raise InputError(f"device={device!r} is not one of cuda, cpu")
        if launcher not in (None, *LAUNCHERS):
            raise InputError(f"launcher={launcher!r} is not one of {', '.join(LAUNCHERS)}")
        self.nproc = nproc
        self.device = device
        self.grace_seconds = grace_seconds
        self.command = command
        self.launcher = launcher
        self._preloaded = PreloadedLauncher()
        self._probes: list[LocalProbe] = []

    def start(self, spec: ProbeSpec) -> LocalProbe:
        """Launch the probe and return at once. What an earlier run left in its folder is set aside.

        Raises InputError where the spec wants more processes than this runner has, another device, or no
        measured step.
        """
        if spec.nproc_per_node > self.nproc:
            raise InputError(
                f"nproc_per_node={spec.nproc_per_node} exceeds this machine's {self.nproc} ({self.device})"
            )
        if spec.device != self.device:
            raise InputError(f"device={spec.device!r}: this runner has {self.device!r}")
        if spec.settings.warmup_steps >= spec.settings.steps:
            raise InputError(
                f"[probe] warmup_steps={spec.settings.warmup_steps} leaves nothing to measure "
                f"of steps={spec.settings.steps}"
            )
        self._probes = [probe for probe in self._probes if probe.poll() is None]
        preloaded = (self.launcher or spec.settings.launcher) == "preloaded"
        probe = LocalProbe(spec, self.command, self.grace_seconds, self._preloaded if preloaded else None)
        self._probes.append(probe)
        return probe

    def close(self) -> None:
        """Cancel and reap everything started here."""
        for probe in self._probes:
            probe.request_stop(StopReason.CANCELLED)
        for probe in self._probes:
            probe.cancel()
        self._probes = []
        self._preloaded.close()

    def __enter__(self) -> LocalRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _Attempt:
    """One launch."""

    warden: processes.Launched
    metrics: files.Metrics
    launched: float
    """Unix time."""
    began: float
    """Monotonic time, for deadlines."""
    oom_kills_before: int
    steps_seen: int = 0
    last_step: float = 0.0
    """Monotonic time of the last complete step."""
    tokens_per_second: float | None = None
    tight: bool = False
    """The interval of the median is as narrow as asked for."""
    cannot_win: bool = False
    """It is slower than ``spec.beat``."""
    stop: StopReason | None = None
    stop_time: float = float("inf")
    """Unix time."""


@dataclass(slots=True)
class LocalProbe:
    """One probe in flight; see ``ProbeHandle``. Work is done in ``poll``: call it a few times a second."""

    spec: ProbeSpec
    command: CommandBuilder
    grace_seconds: float
    preloaded: PreloadedLauncher | None = None
    """Starts the processes in place of ``command``."""
    attempts: int = 0
    outcome: ProbeOutcome | None = None
    _attempt: _Attempt = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _ended: float | None = None

    def __post_init__(self) -> None:
        self.spec = replace(
            self.spec,
            directory=self.spec.directory.resolve(),
            cache_directory=self.spec.cache_directory.resolve(),
        )
        self.spec.directory.mkdir(parents=True, exist_ok=True)
        files.set_aside(self.spec.directory, "earlier")
        self._launch()

    def poll(self) -> ProbeOutcome | None:
        """The outcome once every process of the probe has ended, else ``None``."""
        if self.outcome is not None:
            return self.outcome
        attempt = self._attempt
        ended = attempt.warden.has_ended()
        self._read_metrics()
        if ended:
            self._finish_attempt()
        elif attempt.stop is None and (reason := self._reason_to_stop()) is not None:
            self.request_stop(reason)
        return self.outcome

    def progress(self) -> ProbeProgress:
        """What the probe is doing, as of the last ``poll``."""
        attempt = self._attempt
        if attempt.stop is not None or self.outcome is not None:
            phase = "stopping"
        elif attempt.steps_seen:
            phase = "step"
        else:
            phase = "compiling" if attempt.metrics.logs else "starting"
        return ProbeProgress(
            phase=phase,
            step=attempt.steps_seen,
            steps=self.spec.settings.steps,
            tokens_per_second=attempt.tokens_per_second,
            seconds=(self._ended or time.monotonic()) - self._began,
        )

    def cancel(self) -> ProbeOutcome:
        """Stop every process, wait until they are gone, and return the outcome."""
        while (outcome := self.poll()) is None:
            self.request_stop(StopReason.CANCELLED)
            self._attempt.warden.wait()
        return outcome

    def request_stop(self, reason: StopReason) -> None:
        """Begin to stop, for the first reason given; returns at once."""
        if self.outcome is None and self._attempt.stop is None:
            self._attempt.stop = reason
            self._attempt.stop_time = time.time()
            self._attempt.warden.ask_to_stop()

    def _launch(self) -> None:
        spec = self.spec
        self.attempts += 1
        probe_id = uuid.uuid4().hex
        inherited = dict(os.environ)
        environment = probe_environment(spec, probe_id, inherited)
        command = list(self.command(spec))
        spec.cache_directory.mkdir(parents=True, exist_ok=True)
        write_whole(spec.directory / files.CONFIG, spec.toml)
        write_whole(spec.directory / files.COMMAND, command_text(command, environment, inherited))
        files.write_json(spec.directory / files.ENVIRONMENT, environment_record(spec, environment))
        launched, began = time.time(), time.monotonic()

        def start_command() -> processes.WardenProcess:
            return processes.WardenProcess.start(
                command, spec.directory, environment, probe_id=probe_id, grace_seconds=self.grace_seconds
            )

        self._attempt = _Attempt(
            warden=start_command()
            if self.preloaded is None
            else self.preloaded.start(
                training_arguments(spec),
                spec.nproc_per_node,
                spec.directory,
                environment,
                probe_id=probe_id,
                grace_seconds=self.grace_seconds,
                cold=start_command,
            ),
            metrics=files.Metrics(spec.directory),
            launched=launched,
            began=began,
            oom_kills_before=processes.host_oom_kills(),
        )

    def _read_metrics(self) -> None:
        attempt = self._attempt
        attempt.metrics.read_new()
        steps = attempt.metrics.complete_steps(self.spec.nproc_per_node)
        if steps > attempt.steps_seen:
            attempt.steps_seen = steps
            attempt.last_step = time.monotonic()
            records = attempt.metrics.slowest(self.spec.nproc_per_node)
            attempt.tokens_per_second = measurement.throughputs(self.spec, records)[-1]
            kept = measurement.throughputs(self.spec, measured(records, self.spec.settings.warmup_steps))
            attempt.cannot_win = cannot_win(kept, self.spec.beat)
            attempt.tight = is_tight(
                kept,
                minimum=self.spec.settings.min_measured_steps,
                target_relative_interval=self.spec.settings.target_relative_interval,
            )

    def _reason_to_stop(self) -> StopReason | None:
        attempt, settings, now = self._attempt, self.spec.settings, time.monotonic()
        if attempt.metrics.has_diverged():
            return StopReason.DIVERGED
        if attempt.steps_seen >= settings.steps:
            done = attempt.metrics.have_ended(self.spec.nproc_per_node)
            return StopReason.FINISHED if done or now - attempt.last_step > FINISH_SECONDS else None
        if attempt.tight:
            return StopReason.EARLY
        if attempt.cannot_win:
            return StopReason.CANNOT_WIN
        if now - attempt.began > settings.timeout_seconds:
            return StopReason.TIMEOUT
        if attempt.steps_seen == 0:
            return StopReason.STARTUP if now - attempt.began > settings.startup_seconds else None
        return StopReason.HANG if now - attempt.last_step > settings.hang_seconds else None

    def _finish_attempt(self) -> None:
        """All processes are gone: classify, then relaunch or conclude."""
        found = classify(self._evidence())
        may_retry = found.status is ProbeStatus.INFRASTRUCTURE and self._attempt.stop is None
        if may_retry and self.attempts <= self.spec.settings.retries:
            files.set_aside(self.spec.directory, "attempt")
            self._launch()
            return
        self._conclude(found)

    def _conclude(self, found: Classification) -> None:
        attempt, spec = self._attempt, self.spec
        measured_here = measurement.measurement_of(
            spec,
            attempt.metrics,
            launched=attempt.launched,
            stopped_early=attempt.stop in (StopReason.EARLY, StopReason.CANNOT_WIN),
        )
        wants_float8, wants_compile = measurement.asks_for(tomllib.loads(spec.toml))
        self._ended = time.monotonic()
        facts = {
            "phases": measurement.phases(attempt.metrics, launched=attempt.launched, ended=time.time()),
            "trend": measurement.trend(spec, attempt.metrics),
        }
        outcome = ProbeOutcome(
            status=found.status,
            message=found.message,
            seconds=self._ended - self._began,
            measurement=measured_here,
            details={**found.details, **{name: fact for name, fact in facts.items() if fact}},
            warnings=measurement.silent_failures(
                attempt.metrics, wants_float8=wants_float8, wants_compile=wants_compile
            ),
            attempts=self.attempts,
        )
        write_outcome(spec.directory, outcome)
        self._remove_launcher_logs()
        self.outcome = outcome

    def _evidence(self) -> Evidence:
        attempt, spec = self._attempt, self.spec
        record = attempt.warden.exit_record()
        return Evidence(
            settings=spec.settings,
            returncode=record["returncode"] if record else None,
            complete_steps=attempt.metrics.complete_steps(spec.nproc_per_node),
            losses=attempt.metrics.losses(),
            diverged=attempt.metrics.has_diverged(),
            errors=files.read_errors(spec.directory),
            log_tail=files.log_tail(spec.directory),
            stop=attempt.stop,
            stop_time=attempt.stop_time,
            baseline_losses=spec.baseline_losses,
            host_oom_kills=processes.host_oom_kills() - attempt.oom_kills_before,
            facts={"launcher": attempt.warden.launcher, **measurement.facts(attempt.metrics)},
        )

    def _remove_launcher_logs(self) -> None:
        """torchrun's own copies of what is in stdout.log, unless it was killed before it copied all."""
        record = self._attempt.warden.exit_record()
        if record is not None and record["returncode"] != -9:
            shutil.rmtree(self.spec.directory / files.LAUNCHER_LOGS, ignore_errors=True)
