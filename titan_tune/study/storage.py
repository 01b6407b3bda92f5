"""Opening a study: where it is kept, who may write to it, and one clear line when it cannot be used."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from titan_tune.errors import InputError, StorageError, did_you_mean

DATABASE_FILE = "study.db"
LOCK_FILE = "search.lock"
SQLITE_TIMEOUT_SECONDS = 20
OPTUNA_ERRORS = (
    SQLAlchemyError,
    sqlite3.Error,
    optuna.exceptions.StorageInternalError,
    RuntimeError,
    json.JSONDecodeError,
)
"""What Optuna lets through when its storage fails (RuntimeError: a schema that is not its own)."""

optuna.logging.set_verbosity(optuna.logging.ERROR)


def study_directory(runs: Path, name: str) -> Path:
    """``runs/<study>``; the name must be a plain folder name."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise InputError(f"--study: {name!r} is not a plain name (no slashes)")
    return runs / name


def storage_url(directory: Path, url: str | None) -> str:
    """The user's URL, or the SQLite file in the study's folder."""
    return url or f"sqlite:///{directory / DATABASE_FILE}"


def public_url(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return "<storage>"


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn what Optuna and its database raise into one line that names the storage."""
    try:
        yield
    except OPTUNA_ERRORS as error:
        cause = " ".join(str(_root(error)).split())[:200]
        hint = " (another process holds it)" if "locked" in cause else ""
        raise StorageError(f"{public_url(url)}: cannot use the study storage: {cause}{hint}") from error


def _root(error: BaseException) -> BaseException:
    seen = error
    while seen.__cause__ is not None:
        seen = seen.__cause__
    return getattr(seen, "orig", None) or seen


def open_storage(url: str) -> RDBStorage:
    """Connect; SQLite waits for a lock and checks that an existing file is a sound database."""
    try:
        make_url(url).get_dialect()
        if url.startswith("sqlite"):
            _check_sqlite(url)
            engine: dict[str, object] = {"connect_args": {"timeout": SQLITE_TIMEOUT_SECONDS}}
        else:
            engine = {"pool_pre_ping": True}
        with storage_errors(url):
            return RDBStorage(url, engine_kwargs=engine)
    except (ArgumentError, ValueError, ImportError) as error:
        raise InputError(f"--storage: {public_url(url)}: {' '.join(str(error).split())[:200]}") from error


def _check_sqlite(url: str) -> None:
    path = make_url(url).database
    if not path or path == ":memory:" or not Path(path).exists():
        return
    with storage_errors(url):
        connection = sqlite3.connect(path, timeout=SQLITE_TIMEOUT_SECONDS)
        try:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        finally:
            connection.close()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)


def create_or_load(name: str, url: str, *, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """The study, created on first use; its objective is tokens/s per GPU, maximised."""
    storage = open_storage(url)
    with storage_errors(url):
        return optuna.create_study(
            study_name=name, storage=storage, sampler=sampler, direction="maximize", load_if_exists=True
        )


def load(name: str, url: str) -> optuna.Study:
    """An existing study.

    Raises:
        InputError: there is none of that name; the message lists those that exist.
    """
    path = make_url(url).database if url.startswith("sqlite") else None
    if path and not Path(path).exists():
        raise InputError(f"{path}: no such study database")
    storage = open_storage(url)
    with storage_errors(url):
        names = [s.study_name for s in optuna.get_all_study_summaries(storage, include_best_trial=False)]
    if name not in names:
        known = ", ".join(sorted(names)) or "none"
        raise InputError(
            f"{public_url(url)}: no study {name!r}{did_you_mean(name, names)}; it holds: {known}"
        )
    with storage_errors(url):
        return optuna.load_study(study_name=name, storage=storage)


@contextmanager
def search_lock(directory: Path, study: str) -> Iterator[None]:
    """Hold the study's folder for one search; the lock ends with the process, however it ends.

    Raises:
        InputError: another search on this machine holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise InputError(
                f"study {study!r} is being searched by {holder}; wait for it or choose another --study"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
