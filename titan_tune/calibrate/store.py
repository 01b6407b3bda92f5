"""Calibrations on disk, by the machine's fingerprint, and the clusters that they apply to."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from titan_tune import machine
from titan_tune.calibrate.rates import rates_of
from titan_tune.calibrate.result import SCHEMA, Calibration, Fingerprint
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError
from titan_tune.probe.record import write_whole


def local_fingerprint() -> Fingerprint | None:
    """This machine's; ``None`` where torch is not installed: there is nothing to measure with."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return None
    found = machine.nvidia_machine()
    if not found.gpus:
        return Fingerprint(gpu="cpu", num_gpus=machine.CPU_PROCESSES, driver="", torch=torch)
    return Fingerprint(
        gpu=found.gpus[0].name, num_gpus=len(found.gpus), driver=found.driver or "", torch=torch
    )


def cache_path(fingerprint: Fingerprint) -> Path:
    """Below ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the specification: a relative path is to be ignored
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "titan-tune" / "calibration" / f"{fingerprint.name}.json"


def save(calibration: Calibration, path: Path) -> None:
    """Write the file whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(calibration.model_dump(mode="json"), indent=1) + "\n")


def load(path: Path) -> Calibration | None:
    """The calibration of a file; ``None`` where there is none, or one of another schema.

    Raises:
        InputError: the file holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise _broken(path, "not UTF-8") from None
    try:
        data = json.loads(text)
        if isinstance(data, dict) and data.get("schema_version", SCHEMA) != SCHEMA:
            return None
        return Calibration.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise _broken(path, f"{where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, str(error)) from None


def _broken(path: Path, why: str) -> InputError:
    return InputError(f"{path}: no calibration ({why}); run titan-tune calibrate again, or delete it")


def calibrated(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with this machine's measured rates where it has been calibrated and has that GPU.

    Raises:
        InputError: the stored calibration is not readable as one.
    """
    fingerprint = local_fingerprint()
    if fingerprint is None or cluster.gpu.name != machine.local_cluster().gpu.name:
        return cluster
    found = load(cache_path(fingerprint))
    if found is None or found.fingerprint != fingerprint:
        return cluster
    return cluster.model_copy(update={"rates": rates_of(found)})
