"""What a search writes is for its user alone, and a storage's password is nowhere to be seen."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from titan_tune.cli import run
from titan_tune.cli.private import private_files
from titan_tune.errors import ProbesFailedError
from titan_tune.study.search import Search

SPACE = """
[base.model]
name = "llama3"
flavor = "debugmodel"
[base.training]
seq_len = 64
local_batch_size = 1
[cluster]
gpu = "cpu"
gpus_per_node = 1
[axes]
activation_checkpoint = ["none", "full"]
"""
PASSWORD = "correct-horse-battery"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask():
    """The most careless umask there is."""
    before = os.umask(0)
    yield
    assert os.umask(before) == 0, "the user's umask is as it was"


def test_files_of_this_and_of_started_processes_are_private(tmp_path, open_umask):
    with private_files():
        (tmp_path / "own" / "deep").mkdir(parents=True)
        (tmp_path / "own" / "file").write_text("x")
        subprocess.run(["sh", "-c", "mkdir child; echo x > child/file"], cwd=tmp_path, check=True)
    assert {mode(tmp_path / name) for name in ("own", "own/deep", "child")} == {0o700}
    assert {mode(tmp_path / name) for name in ("own/file", "child/file")} == {0o600}


def test_everything_a_search_leaves_is_private(tmp_path, monkeypatch, open_umask, capsys):
    """Folders and files of the study, with a probe's stand-in for what ranks and compilers write."""

    def probe_files(search: Search) -> str:
        directory = tmp_path / "runs" / "space"
        subprocess.run(
            ["sh", "-c", "mkdir -p trials/x cache/rank0; echo x > trials/x/metrics.rank0.jsonl"],
            cwd=directory,
            check=True,
        )
        raise ProbesFailedError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Search, "run", probe_files)
    (tmp_path / "space.toml").write_text(SPACE)
    assert run(["search", "space.toml"]) == 4
    written = sorted((tmp_path / "runs").rglob("*"))
    assert {"study.db", "search.lock", "metrics.rank0.jsonl", "cache"} <= {path.name for path in written}
    for path in (tmp_path / "runs", *written):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
@pytest.mark.parametrize("form", ["--storage {}", "--storage={}"])
def test_a_password_is_not_in_the_list_of_processes(tmp_path, form):
    """The server is a socket that never answers: the search waits, and its command line can be read."""
    pytest.importorskip("psycopg", reason="needs the postgres extra")
    (tmp_path / "space.toml").write_text(SPACE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        url = f"postgresql+psycopg://me:{PASSWORD}@127.0.0.1:{server.getsockname()[1]}/db"
        search = subprocess.Popen(
            [sys.executable, "-m", "titan_tune", "search", "space.toml", *form.format(url).split()],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            connection, _ = server.accept()
            with connection:
                shown = Path(f"/proc/{search.pid}/cmdline").read_bytes()
        finally:
            search.kill()
            said, _ = search.communicate()
    assert b"titan_tune" in shown and b"search" in shown
    assert PASSWORD.encode() not in shown
    assert PASSWORD not in said
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and PASSWORD.encode() in p.read_bytes()]
