"""One trial on disk: its folder, what was predicted for it, how long it ran."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path

from titan_tune.study.plan import Ranked
from titan_tune.units import GIB

FOLDER_FILE = "folder.id"
"""In a study's folder: what tells it from folders of the same name on other disks."""


def predictions(item: Ranked) -> dict[str, float]:
    """What the formula said, kept beside what was measured."""
    found: dict[str, float] = {}
    if item.memory:
        found |= {
            "active_gib": item.memory.active_bytes / GIB,
            "reserved_gib": item.memory.reserved_bytes / GIB,
            "device_gib": item.memory.device_bytes / GIB,
        }
    if item.step_time:
        found["tokens_per_second_per_gpu"] = item.step_time.tokens_per_second_per_gpu
    return found


def new_directory(study_directory: Path, config_id: str) -> Path:
    """A new trial folder: ``trials/<config_id>``, later runs with ``-2``, ``-3``, …, whoever else makes some."""
    number = 1
    while True:
        name = config_id if number == 1 else f"{config_id}-{number}"
        directory = study_directory / "trials" / name
        try:
            directory.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return directory


def folder_id(study_directory: Path) -> str:
    """The identity of a study's folder, written on first use: two searches with the same one share a disk."""
    path = study_directory / FOLDER_FILE
    if not path.exists():
        study_directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=study_directory, prefix=f".{FOLDER_FILE}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"{uuid.uuid4().hex}\n")
            os.link(temporary, path)  # whole, or not at all, and only for the first
        except FileExistsError:
            pass
        finally:
            Path(temporary).unlink()
    return path.read_text(encoding="utf-8").strip()


def active_seconds(directory: Path) -> float:
    """How long a lost probe ran at least: from the first to the last change of a file in its folder."""
    times = [path.stat().st_mtime for path in directory.glob("*")] if directory.is_dir() else []
    return max(times) - min(times) if times else 0.0
