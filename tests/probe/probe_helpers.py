"""Specs and process searches that the tests of probes share."""

import json
import sys
import time
from pathlib import Path

from titan_tune.domain.probe import ProbeSettings, ProbeSpec

HERE = Path(__file__).parent


def fake_command(**scenario):
    text = json.dumps({"ranks": 1, "steps": 0, "seconds": 0.5, "then": "exit", **scenario})
    return lambda spec: [sys.executable, str(HERE / "fake_launcher.py"), text]


def spec_in(directory, *, nproc=1, toml="", environment=(), tokens=1000.0, **settings):
    defaults = {"steps": 10, "warmup_steps": 2, "startup_seconds": 120, "hang_seconds": 60, "retries": 0}
    return ProbeSpec(
        config_id="abc",
        directory=directory / "trial",
        toml=toml,
        nproc_per_node=nproc,
        device="cpu",
        settings=ProbeSettings(**{**defaults, **settings}),
        cache_directory=directory / "cache",
        tokens_per_step_per_rank=tokens,
        environment=tuple(environment),
    )


def wait_for_outcome(probe, *, seconds=120.0):
    return wait_until(probe.poll, seconds=seconds)


def wait_until(condition, *, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{condition} was not met within {seconds} s"
        time.sleep(0.05)
    return found


def processes_with(mark):
    """Pids of processes whose environment contains ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found
