"""A cluster as tests use it: scripted probes on it, and what is left of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from slurm_cluster import SlurmCluster

from titan_tune.domain.probe import ProbeSettings, ProbeSpec
from titan_tune.probe.slurm.notes import JOB_FILE
from titan_tune.probe.slurm.patience import Patience
from titan_tune.probe.slurm.runner import SlurmRunner
from titan_tune.probe.slurm.settings import SlurmSettings

HERE = Path(__file__).parent
FAKE_PYTHON = HERE / "fake_python.py"
SHORT = Patience(pending=60, hopeless=1.0, unreachable=60, cancel=30, forgotten=1.0, settle=0.5, again=0.2)


def spec_in(
    directory, *, nodes=1, nproc=1, scenario=None, toml="", tokens=1000.0, device="cpu", **settings
) -> ProbeSpec:
    defaults = {"steps": 10, "warmup_steps": 2, "startup_seconds": 120, "hang_seconds": 60, "retries": 0}
    return ProbeSpec(
        config_id="abc",
        directory=directory,
        toml=toml,
        nproc_per_node=nproc,
        num_nodes=nodes,
        device=device,
        settings=ProbeSettings(**{**defaults, **settings}),
        cache_directory=directory / "cache",
        tokens_per_step_per_rank=tokens,
        environment=(("FAKE_SCENARIO", json.dumps(scenario or {})),),
    )


class Cluster:
    """One test's use of a cluster."""

    def __init__(self, slurm: SlurmCluster, directory: Path) -> None:
        self.slurm, self.directory = slurm, directory
        self.environ = dict(slurm.env)
        self._runners: list[SlurmRunner] = []

    def runner(self, *, patience=SHORT, slots=4, **settings) -> SlurmRunner:
        """A runner whose jobs run the scripted ranks, unless ``python`` says otherwise."""
        settings = {"python": str(FAKE_PYTHON), "cache_directory": str(self.directory / "cache"), **settings}
        runner = SlurmRunner(
            SlurmSettings(**settings),
            directory=self.directory,
            slots=slots,
            study="test",
            environ=self.environ,
            patience=patience,
            poll_seconds=0.1,
            command_seconds=20,
        )
        self._runners.append(runner)
        return runner

    def spec(self, name="trial", **options) -> ProbeSpec:
        return spec_in(self.directory / name, **options)

    def start(self, *, runner=None, **options):
        return (runner or self.runner()).start(self.spec(**options))

    def running(self, probe) -> str:
        """Wait until every node of a probe has written; its job's id."""
        ranks = range(probe.spec.world_size)
        files = [probe.spec.directory / f"metrics.rank{rank}.jsonl" for rank in ranks]
        wait_until(lambda: probe.poll() or all(file.exists() for file in files))
        assert probe.outcome is None, probe.outcome
        return self.job_id(probe)

    def job_id(self, probe) -> str:
        """Wait until a probe's job has an id."""
        path = probe.spec.directory / JOB_FILE
        return wait_until(lambda: probe.poll() or json.loads(path.read_text())["job_id"])

    def set_down(self, node: str) -> None:
        """An administrator, or a health check, takes a node away; it comes back by itself."""
        self.slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=injected fault")

    def close_runners(self) -> None:
        while self._runners:
            self._runners.pop().close()


def outcome_of(probe, *, seconds=60.0):
    return wait_until(probe.poll, seconds=seconds)


def wait_until(condition: Callable, *, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{condition} was not met within {seconds} s"
        time.sleep(0.03)
    return found


def cause_of(outcome) -> str:
    return outcome.details["slurm"]["cause"]


def processes_of(probe) -> list[int]:
    return processes_in(probe.spec.directory)


def processes_in(directory) -> list[int]:
    """Pids of processes that carry the mark of a trial folder."""
    mark = f"TITAN_TUNE_METRICS_DIR={directory}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found
