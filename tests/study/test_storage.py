import multiprocessing
import os
import sqlite3
import sys
from pathlib import Path

import pytest

from titan_tune.errors import InputError, StorageError
from titan_tune.study import storage


def sampler():
    import optuna

    return optuna.samplers.RandomSampler(seed=0)


def make(tmp_path, name="s"):
    url = storage.storage_url(tmp_path, None)
    return url, storage.create_or_load(name, url, sampler=sampler())


def test_created_once_and_loaded_again(tmp_path):
    url, study = make(tmp_path)
    study.set_user_attr("x", 1)
    _, again = make(tmp_path)
    assert again.user_attrs == {"x": 1}
    assert storage.load("s", url).user_attrs == {"x": 1}


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 50])
def test_a_file_that_is_no_database_is_one_clear_line(tmp_path, content):
    (tmp_path / "study.db").write_bytes(content)
    url = storage.storage_url(tmp_path, None)
    if not content:
        storage.create_or_load("s", url, sampler=sampler())  # an empty file is a new SQLite database
        return
    with pytest.raises(
        StorageError, match=r"study\.db: cannot use the study storage: file is not a database"
    ):
        storage.create_or_load("s", url, sampler=sampler())


def test_a_damaged_page_is_found_before_anything_is_written(tmp_path):
    url, _ = make(tmp_path)
    path = tmp_path / "study.db"
    data = bytearray(path.read_bytes())
    data[8192:12288] = os.urandom(4096)
    path.write_bytes(data)
    with pytest.raises(StorageError, match="cannot use the study storage"):
        storage.create_or_load("s", url, sampler=sampler())
    assert path.read_bytes() == bytes(data)


def test_another_programs_database_is_refused(tmp_path):
    connection = sqlite3.connect(tmp_path / "study.db")
    connection.execute("create table studies (a int)")
    connection.commit()
    connection.close()
    with pytest.raises(StorageError, match="cannot use the study storage"):
        make(tmp_path)


def test_a_locked_database_says_so(tmp_path, monkeypatch):
    url, _ = make(tmp_path)
    monkeypatch.setattr(storage, "SQLITE_TIMEOUT_SECONDS", 0.2)
    holder = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(StorageError, match=r"database is locked \(another process holds it\)"):
            storage.create_or_load("s", url, sampler=sampler())
    finally:
        holder.close()


def test_an_unknown_study_lists_those_that_exist(tmp_path):
    url, _ = make(tmp_path, "llama")
    with pytest.raises(InputError, match=r"no study 'lama' \(did you mean llama\?\); it holds: llama"):
        storage.load("lama", url)


def test_a_missing_database_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no such study database"):
        storage.load("s", storage.storage_url(tmp_path, None))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_study_names_are_plain_folder_names(tmp_path, name):
    with pytest.raises(InputError, match="--study"):
        storage.study_directory(tmp_path, name)


@pytest.mark.parametrize("url", ["nodb://me:secret@host/x", "secret", "oracle://me:secret@host/x"])
def test_a_bad_url_names_the_flag_and_hides_the_password(url):
    with pytest.raises(InputError) as caught:
        storage.create_or_load("s", url, sampler=sampler())
    assert "--storage" in str(caught.value)
    assert url == "secret" or "secret" not in str(caught.value)


def test_the_password_of_a_url_is_not_shown():
    assert storage.public_url("postgresql://me:secret@host/x") == "postgresql://me:***@host/x"


def _hold(directory, ready, release):
    with storage.search_lock(directory, "s"):
        ready.set()
        release.wait(30)


def test_only_one_search_at_a_time_and_the_lock_dies_with_its_holder(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready, release))
    holder.start()
    try:
        assert ready.wait(60)
        with (
            pytest.raises(InputError, match=f"is being searched by process {holder.pid} "),
            storage.search_lock(tmp_path, "s"),
        ):
            pass
        holder.kill()
        holder.join(30)
        with storage.search_lock(tmp_path, "s"):
            assert (tmp_path / "search.lock").read_text().startswith(f"process {os.getpid()} ")
    finally:
        holder.kill()
        holder.join(30)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, "sqlite:////runs/s/study.db"),
        ("journal:///shared/s.journal", "journal:///shared/s.journal"),
        ("/shared/s.log", "journal:///shared/s.log"),
        ("/shared/with space.journal", "journal:///shared/with space.journal"),
        ("postgresql://me@host/x", "postgresql://me@host/x"),
        ("sqlite:////tmp/x.log", "sqlite:////tmp/x.log"),
    ],
)
def test_a_journal_is_named_by_its_file(given, kept):
    assert storage.storage_url(Path("/runs/s"), given) == kept
    assert storage.public_url(kept) == kept


def test_a_relative_journal_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage.storage_url(tmp_path, "x.journal") == f"journal://{tmp_path}/x.journal"


def test_a_missing_journal_is_not_made_by_reading(tmp_path):
    with pytest.raises(InputError, match=r"x\.journal: no such study database"):
        storage.load("s", f"journal://{tmp_path}/x.journal")
    assert not list(tmp_path.iterdir())


SECRETS = [
    ("postgresql://me:secret@host/x", "postgresql://me:***@host/x"),
    ("postgresql://me:s%2Fec%3Aret@host/x", "postgresql://me:***@host/x"),
    ("postgresql://me@host/x?password=secret", "postgresql://me@host/x?password=***"),
    ("postgresql://me:a@host/x?sslpassword=secret&sslmode=require", None),
]


@pytest.mark.parametrize(("url", "shown"), SECRETS)
def test_no_spelling_of_a_password_is_shown(url, shown):
    public = storage.public_url(url)
    assert shown is None or public == shown
    hidden = storage.passwords(url)
    assert hidden and not any(f":{secret}@" in public or f"={secret}" in public for secret in hidden)
    for text in (f"FATAL: password for {url}", *hidden):
        cleaned = storage.without_passwords(text, url)
        assert "secret" not in cleaned and "ec%3Aret" not in cleaned and "s/ec:ret" not in cleaned


def test_a_server_that_is_not_there_is_one_line_without_the_password():
    with pytest.raises(StorageError) as caught:
        storage.create_or_load("s", "postgresql://me:sesame@127.0.0.1:9/x", sampler=sampler())
    text = str(caught.value)
    assert "cannot use the study storage" in text and "sesame" not in text and "\n" not in text


def test_a_study_folder_is_the_users_own(tmp_path):
    with storage.search_lock(tmp_path / "runs" / "s", "s"):
        assert (tmp_path / "runs" / "s").stat().st_mode & 0o777 == 0o700


@pytest.mark.postgres
def test_a_study_lives_in_postgresql(postgres_url):
    study = storage.create_or_load("s", postgres_url, sampler=sampler())
    study.set_user_attr("x", 1)
    plain = postgres_url.replace("postgresql+psycopg:", "postgresql:")
    assert storage.load("s", plain).user_attrs == {"x": 1}
    with pytest.raises(InputError, match=r"no study 't'; it holds: s"):
        storage.load("t", postgres_url)


def test_missing_driver_names_the_extra(monkeypatch):
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InputError, match=r"pip install 'titan-tune\[postgres\]'"):
        storage.create_or_load("s", "postgresql://me@127.0.0.1:9/x", sampler=sampler())
