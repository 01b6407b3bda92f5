"""The study that a command is asked about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from titan_tune.errors import InputError

if TYPE_CHECKING:
    from titan_tune.study.open import OpenStudy


def opened_study(study: str, *, storage: str | None, runs_dir: Path) -> OpenStudy:
    """The study of that name, or in that folder.

    Raises:
        InputError: no such study; where something else than a study was named, the message says so.
        StorageError: its storage cannot be read.
    """
    from titan_tune.study.open import open_study

    if not study:
        raise InputError("STUDY: is empty; give a study's name or its folder")
    try:
        return open_study(study, storage=storage, runs_dir=runs_dir)
    except InputError as error:
        if storage is None and Path(study).is_file():
            raise InputError(f"{study}: is a file, not a study: give a study's name or its folder") from error
        if storage is None and "/" not in study and not runs_dir.is_dir():
            kind = "is a file, not a folder" if runs_dir.exists() else "there is no such folder"
            raise InputError(f"{runs_dir / study}: no such study; --runs-dir {runs_dir}: {kind}") from error
        raise
