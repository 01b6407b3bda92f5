"""Opening a study: where it is kept, who may write to it, and one clear line when it cannot be used.

Three kinds of storage: an SQLite file in the study's folder (the default, for one machine), a journal file (for hosts
that share a file system), or a database server by URL. The last two may be shared by several searches.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import random
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages.journal import JournalStorage
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)

from titan_tune.errors import InputError, StorageError, did_you_mean
from titan_tune.study.journal import open_journal

DATABASE_FILE = "study.db"
LOCK_FILE = "search.lock"
STORAGE_VARIABLE: Final = "TITAN_TUNE_STORAGE"
"""Names the storage without showing it in the list of processes."""
JOURNAL_SCHEME: Final = "journal://"
JOURNAL_SUFFIXES: Final = (".journal", ".log")
SQLITE_TIMEOUT_SECONDS = 20
CONNECT_SECONDS: Final = 10
"""How long a server may take to accept a connection or to acknowledge what it was sent."""
CREATION_ATTEMPTS: Final = 20
"""Of several processes that make the tables at once, all but one fail; one retry was always enough (20 of 20)."""
OPTUNA_ERRORS = (
    SQLAlchemyError,
    sqlite3.Error,
    optuna.exceptions.StorageInternalError,
    RuntimeError,
    json.JSONDecodeError,
    OSError,
)
"""What Optuna lets through when its storage fails (RuntimeError: a schema that is not its own, or a lost lock)."""
CHOICES: Final = "a .journal or .log file, sqlite:///FILE or postgresql://USER@HOST/DATABASE"
_PASSWORD_KEYS = ("password", "passwd", "pwd", "sslpassword")

optuna.logging.set_verbosity(optuna.logging.ERROR)

Result = TypeVar("Result")


def study_directory(runs: Path, name: str) -> Path:
    """``runs/<study>``; the name must be a plain folder name."""
    if not name or name in (".", "..") or "/" in name or not name.isprintable():
        raise InputError(f"--study: {name!r} is not a plain name (no slashes, no control characters)")
    return runs / name


def storage_url(directory: Path, url: str | None) -> str:
    """The storage in one form: the user's URL or journal file, or the SQLite file in the study's folder."""
    if not url:
        if "?" in str(directory):  # what follows would be the URL's options
            raise InputError(f"{directory}: a path with '?' cannot hold the study's database; name another")
        return f"sqlite:///{directory / DATABASE_FILE}"
    path = journal_path(url)
    return f"{JOURNAL_SCHEME}{path}" if path else url


def journal_path(url: str) -> Path | None:
    """The file of a journal, absolute: ``journal:///path``, or a plain path that ends in .journal or .log."""
    if url.startswith(JOURNAL_SCHEME):
        return Path(url.removeprefix(JOURNAL_SCHEME)).absolute()
    if "://" not in url and url.endswith(JOURNAL_SUFFIXES):
        return Path(url).absolute()
    return None


def public_url(url: str) -> str:
    """The URL without its password."""
    if journal_path(url) or not any(mark in url for mark in "@:="):
        return url
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError):
        return "<storage>"
    hidden = {key: "***" for key in parsed.query if key.lower() in _PASSWORD_KEYS}
    # the query would percent-encode the stars
    return parsed.update_query_dict(hidden).render_as_string(hide_password=True).replace("%2A", "*")


def passwords(url: str) -> tuple[str, ...]:
    """Every password that a URL holds, as it may be spelled in a message or a command line; longest first."""
    if journal_path(url):
        return ()
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError):
        return ()
    found = [str(parsed.password)] if parsed.password else []
    for key, value in parsed.query.items():
        if key.lower() in _PASSWORD_KEYS:
            found += [value] if isinstance(value, str) else list(value)
    spelled = {form for secret in found for form in (secret, quote(secret), quote(secret, safe=""))}
    return tuple(sorted(filter(None, spelled), key=lambda text: (-len(text), text)))


def without_passwords(text: str, url: str) -> str:
    """``text`` with the passwords of ``url`` replaced."""
    for secret in passwords(url):
        text = text.replace(secret, "***")
    return text


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn what Optuna and its database raise into one line that names the storage.

    ``UpdateFinishedTrialError`` passes: it says what another search did, not that the storage failed.
    """
    try:
        yield
    except UpdateFinishedTrialError:
        raise
    except OPTUNA_ERRORS as error:
        cause = without_passwords(" ".join(str(_root(error)).split())[:200], url)
        hint = " (another process holds it)" if "locked" in cause else ""
        raise StorageError(f"{public_url(url)}: cannot use the study storage: {cause}{hint}") from error


def _root(error: BaseException) -> BaseException:
    seen = error
    while seen.__cause__ is not None:
        seen = seen.__cause__
    return getattr(seen, "orig", None) or seen


def open_storage(url: str) -> BaseStorage:
    """Connect; SQLite waits for a lock and checks that an existing file is a sound database, a torn last line of
    a journal is cut off."""
    path = journal_path(url)
    if path is not None:
        with storage_errors(url):
            path.parent.mkdir(parents=True, exist_ok=True)
            backend, _ = open_journal(path)
            return JournalStorage(backend)
    parsed = _database(url)
    if parsed.get_backend_name() == "sqlite":
        _check_sqlite(url)
    with storage_errors(url), _usable(url):
        text = parsed.render_as_string(hide_password=False)
        return _once_created(lambda: RDBStorage(text, engine_kwargs=_engine_options(parsed)))


def check_storage(url: str | None) -> None:
    """Raise InputError where ``url`` names no kind of storage; nothing is opened or made."""
    if url and not journal_path(url):
        _database(url)


def _database(url: str) -> URL:
    """The URL of a database that SQLAlchemy knows, with its driver."""
    try:
        with _usable(url):
            parsed = _with_driver(make_url(url))
            parsed.get_dialect()
            return parsed
    except (NoSuchModuleError, ArgumentError):
        raise InputError(f"--storage: {public_url(url)}: is none of: {CHOICES}") from None


@contextmanager
def _usable(url: str) -> Iterator[None]:
    """One line for a port that is no number and for a driver that is not installed."""
    try:
        yield
    except ValueError:  # its text may be a part of the password
        reason = "a port is a number, and special characters in a password are written %XX"
        raise InputError(f"--storage: {public_url(url)}: cannot be read: {reason}") from None
    except ImportError as error:
        cause = without_passwords(" ".join(str(error).split())[:200], url)
        hint = " (pip install 'titan-tune[postgres]')" if url.startswith("postgres") else ""
        raise InputError(f"--storage: {public_url(url)}: {cause}{hint}") from error


def _with_driver(url: URL) -> URL:
    """PostgreSQL without a named driver: psycopg, which the ``postgres`` extra brings."""
    if url.drivername in ("postgres", "postgresql") and importlib.util.find_spec("psycopg"):
        return url.set(drivername="postgresql+psycopg")
    return url


def _engine_options(url: URL) -> dict[str, Any]:
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": SQLITE_TIMEOUT_SECONDS}}
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_driver_name().startswith("psycopg"):
        # libpq's own defaults wait for minutes on a host that does not answer
        limits = {"connect_timeout": CONNECT_SECONDS, "tcp_user_timeout": CONNECT_SECONDS * 1000}
        options["connect_args"] = {name: value for name, value in limits.items() if name not in url.query}
    return options


def _once_created(create: Callable[[], Result]) -> Result:
    """``create``, tried again when another process makes the same tables or rows at the same moment."""
    for _ in range(CREATION_ATTEMPTS - 1):
        try:
            return create()
        except OPTUNA_ERRORS as error:
            if not _is_a_creation_race(error):
                raise
        time.sleep(random.uniform(0.05, 0.25))
    return create()


def _is_a_creation_race(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (IntegrityError, ProgrammingError)):
            return True
        if isinstance(seen, OperationalError) and "already exists" in str(seen):
            return True
        seen = seen.__cause__
    return False


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
        return _once_created(
            lambda: optuna.create_study(
                study_name=name, storage=storage, sampler=sampler, direction="maximize", load_if_exists=True
            )
        )


def stored_name(name: str, url: str) -> str:
    """What a study's own database calls it: ``name``, or the one name that it holds where the folder was renamed."""
    path = make_url(url).database
    if path is None or not Path(path).exists():
        return name
    names = _names(open_storage(url), url)
    return names[0] if len(names) == 1 else name


def _names(storage: BaseStorage, url: str) -> list[str]:
    with storage_errors(url):
        summaries = optuna.get_all_study_summaries(storage, include_best_trial=False)
    return sorted(summary.study_name for summary in summaries)


def load(name: str, url: str) -> optuna.Study:
    """An existing study.

    Raises:
        InputError: there is none of that name; the message lists those that exist.
    """
    path = journal_path(url) or (url.startswith("sqlite") and make_url(url).database)
    if path and not Path(path).exists():
        raise InputError(f"{path}: no such study database")
    storage = open_storage(url)
    names = _names(storage, url)
    if name not in names:
        known = ", ".join(names) or "none"
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
    private_directory(directory)
    with (directory / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise InputError(
                f"study {study!r} is being searched by {holder}; wait for it, choose another --study, or name a"
                " --storage, which several searches may share"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def private_directory(directory: Path) -> None:
    """Make a study's folder, for the user alone; one that exists stays as it is."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
