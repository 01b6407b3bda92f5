"""Probes on this machine: forked from a preloaded process, or torchrun under a warden; watched through the ranks'
metrics files."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from titan_tune.domain.probe import ProbeOutcome, ProbeProgress, ProbeSpec, ProbeStatus
from titan_tune.errors import InputError
from titan_tune.probe import files, processes
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
from titan_tune.probe.toml import check_steps
from titan_tune.probe.watch import Watch

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
        """``device`` is cuda or cpu. ``grace_seconds`` is how long workers may take to end before they are
        killed. ``launcher`` is torchrun or preloaded, and ``None`` leaves it to ``ProbeSettings.launcher``.
        ``command`` builds what is launched for a spec: always with torchrun, where a fork fails with preloaded.
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
        check_steps(spec.settings)
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
    watch: Watch
    launched: float
    """Unix time."""
    began: float
    """Monotonic time, for deadlines."""
    oom_kills_before: int
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
        attempt.watch.read_new(self.spec)
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
        elif attempt.watch.steps_seen:
            phase = "step"
        else:
            phase = "compiling" if attempt.watch.metrics.logs else "starting"
        return ProbeProgress(
            phase=phase,
            step=attempt.watch.steps_seen,
            steps=self.spec.settings.steps,
            tokens_per_second=attempt.watch.tokens_per_second,
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
            watch=Watch(files.Metrics(spec.directory)),
            launched=launched,
            began=began,
            oom_kills_before=processes.host_oom_kills(),
        )

    def _reason_to_stop(self) -> StopReason | None:
        watch = self._attempt.watch
        return watch.reason_to_stop(
            self.spec.settings,
            began=self._attempt.began,
            all_ended=watch.metrics.have_ended(self.spec.world_size),
        )

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
        self._ended = time.monotonic()
        findings = attempt.watch.findings(
            spec, launched=attempt.launched, ended=time.time(), stop=attempt.stop
        )
        outcome = ProbeOutcome(
            status=found.status,
            message=found.message,
            seconds=self._ended - self._began,
            measurement=findings.measurement,
            details={**found.details, **findings.details},
            warnings=(*findings.warnings, *self._not_preloaded()),
            attempts=self.attempts,
        )
        write_outcome(spec.directory, outcome)
        self._remove_launcher_logs()
        self.outcome = outcome

    def _not_preloaded(self) -> tuple[str, ...]:
        """What to say where the preloaded launcher was asked for and torchrun had to do it."""
        used = self._attempt.warden.launcher
        if self.preloaded is None or used == "preloaded":
            return ()
        return (f"the preloaded launcher could not start this probe: it ran under {used}",)

    def _evidence(self) -> Evidence:
        attempt, spec = self._attempt, self.spec
        record = attempt.warden.exit_record()
        return attempt.watch.evidence(
            spec,
            stop=attempt.stop,
            stop_time=attempt.stop_time,
            returncode=record["returncode"] if record else None,
            host_oom_kills=processes.host_oom_kills() - attempt.oom_kills_before,
            facts={"launcher": attempt.warden.launcher},
        )

    def _remove_launcher_logs(self) -> None:
        """torchrun's own copies of what is in stdout.log, unless it was killed before it copied all."""
        record = self._attempt.warden.exit_record()
        if record is not None and record["returncode"] != -9:
            shutil.rmtree(self.spec.directory / files.LAUNCHER_LOGS, ignore_errors=True)
