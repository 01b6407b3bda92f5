"""Starts the measuring processes and reads what they found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import titan_tune
from titan_tune.calibrate.result import Calibration, Fingerprint
from titan_tune.errors import ProbesFailedError
from titan_tune.probe import files
from titan_tune.probe.processes import WardenProcess
from titan_tune.titan.plugin.environment import PROBE_ID

START_SECONDS: Final = 240.0
"""Imports of torch on every rank, NCCL's start and the first cuBLAS and cuDNN calls, on a slow file system."""
GRACE_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.1
REQUEST: Final = "request.json"
RESULT: Final = "calibration.json"


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """``seconds`` is spent measuring, start-up left out."""

    device: str
    """cuda or cpu."""
    num_ranks: int
    seconds: float = 60.0


def measure(
    options: CalibrationOptions,
    fingerprint: Fingerprint,
    *,
    on_wait: Callable[[float], None] = lambda seconds: None,
) -> Calibration:
    """Measure this machine; every process that was started has ended when this returns.

    Args:
        options: what to measure on.
        fingerprint: of this machine.
        on_wait: called several times a second with the seconds since the start.

    Raises:
        ProbesFailedError: the processes failed or did not end in time; says what the last of them said.
    """
    with tempfile.TemporaryDirectory(prefix="titan-tune-calibrate-") as folder:
        directory = Path(folder)
        _run(options, directory, on_wait)
        found = json.loads((directory / RESULT).read_text(encoding="utf-8"))
    del found["torch"]
    return Calibration.model_validate(found | {"fingerprint": fingerprint})


def _run(options: CalibrationOptions, directory: Path, on_wait: Callable[[float], None]) -> None:
    request = {"device": options.device, "seconds": options.seconds, "output": str(directory / RESULT)}
    (directory / REQUEST).write_text(json.dumps(request), encoding="utf-8")
    run_id = uuid.uuid4().hex
    warden = WardenProcess.start(
        _command(options.num_ranks, directory),
        directory,
        _environment(options, run_id, os.environ),
        probe_id=run_id,
        grace_seconds=GRACE_SECONDS,
    )
    began = time.monotonic()
    deadline = began + START_SECONDS + 2 * options.seconds
    try:
        while not warden.has_ended():
            if time.monotonic() > deadline:
                raise ProbesFailedError(
                    f"calibration did not end within {deadline - began:.0f} s ({_last_words(directory)})"
                )
            on_wait(time.monotonic() - began)
            time.sleep(POLL_SECONDS)
    finally:
        warden.ask_to_stop()
        warden.wait()
    if not (directory / RESULT).exists():
        raise ProbesFailedError(f"calibration failed: {_last_words(directory)}")


def _command(num_ranks: int, directory: Path) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        "-m", "titan_tune.calibrate.child", str(directory / REQUEST),
    ]  # fmt: skip


def _environment(options: CalibrationOptions, run_id: str, inherited: Mapping[str, str]) -> dict[str, str]:
    added = {PROBE_ID: run_id, "PYTHONUNBUFFERED": "1"}
    if options.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        added["OMP_NUM_THREADS"] = str(max(1, cores // options.num_ranks))
    # the ranks find this package wherever it was imported from
    root = str(Path(titan_tune.__file__).resolve().parents[1])
    added["PYTHONPATH"] = os.pathsep.join(filter(None, (root, inherited.get("PYTHONPATH"))))
    return {**inherited, **added}


def _last_words(directory: Path) -> str:
    """The line of the log that says most: the last error of a rank, else the last line."""
    path = directory / files.LOG
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if _is_error(line)]
    return (errors or said or ["no output"])[-1][:300]


def _is_error(line: str) -> bool:
    head, colon, _ = line.partition(": ")
    name = head.split()[-1] if head.split() else ""
    return bool(colon) and name.endswith("Error") and "ChildFailedError" not in line
