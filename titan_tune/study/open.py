"""Reading a study that exists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan_tune.errors import InputError, did_you_mean
from titan_tune.study import storage as store
from titan_tune.study.info import StudyInfo, read_info
from titan_tune.study.records import TrialRecord, records_of


@dataclass(frozen=True)
class OpenStudy:
    """A study's name, what it says of itself and its finished probes."""

    name: str
    info: StudyInfo
    records: tuple[TrialRecord, ...]
    directory: Path


def open_study(name_or_folder: str, *, storage: str | None, runs_dir: Path) -> OpenStudy:
    """Find a study by name in ``runs_dir`` (or by its folder) and read it.

    Raises:
        InputError: no such study; the message lists those that exist.
        StorageError: its storage cannot be read.
    """
    folder = Path(name_or_folder)
    if "/" in name_or_folder or (folder / store.DATABASE_FILE).exists():
        runs_dir, name = folder.absolute().parent, folder.absolute().name
    else:
        name = name_or_folder
    directory = store.study_directory(runs_dir, name)
    if storage is None and not (directory / store.DATABASE_FILE).exists():
        found = sorted(p.parent.name for p in runs_dir.glob(f"*/{store.DATABASE_FILE}"))
        known = f"{runs_dir} holds: {', '.join(found) or 'none'}"
        raise InputError(f"{directory}: no such study{did_you_mean(name, found)}; {known}")
    url = store.storage_url(directory, storage)
    study = store.load(store.stored_name(name, url) if storage is None else name, url)
    with store.storage_errors(url):
        info, records = read_info(study), records_of(study)
    if info is None:
        raise InputError(f"{directory}: the study was not made by titan-tune")
    return OpenStudy(name, info, records, directory)
