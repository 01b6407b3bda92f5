"""Passwords of ``--storage``: not in the list of processes, not in the environment of probes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from titan_tune.cli import storage

URL = "postgresql://me:sesame@127.0.0.1/x"


def test_the_variable_is_the_one_that_the_study_knows():
    from titan_tune.study.storage import STORAGE_VARIABLE

    assert storage.VARIABLE == STORAGE_VARIABLE


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (
            ["python", "-m", "t", "search", "--storage", URL, "job.toml"],
            ["python", "-m", "t", "search", "job.toml"],
        ),
        (["t", f"--storage={URL}", "x"], ["t", "x"]),
        (["t", "--storage", "other", URL], ["t", "--storage", "other", URL]),
        (["t", "x"], ["t", "x"]),
    ],
)
def test_a_command_line_without_the_storage(arguments, kept):
    assert storage.without_storage(arguments, URL) == kept


def test_probes_do_not_inherit_the_storage(monkeypatch):
    monkeypatch.setenv(storage.VARIABLE, URL)
    assert storage.concealed(URL) == URL
    assert storage.VARIABLE not in os.environ


@pytest.mark.parametrize("command", ["export", "report"])
def test_a_password_leaves_the_list_of_processes_and_never_reaches_the_output(tmp_path, command):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        port = silent.getsockname()[1]
        url = f"postgresql://me:sesame@127.0.0.1:{port}/x?connect_timeout=3"
        process = subprocess.Popen(
            [sys.executable, "-m", "titan_tune", command, "s", "--storage", url],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            silent.settimeout(120)
            connection, _ = silent.accept()
            line = Path(f"/proc/{process.pid}/cmdline").read_text()
            assert "sesame" not in line and command in line
            connection.close()
            text, _ = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 2
    assert "cannot use the study storage" in text and "me:***@127.0.0.1" in text and "sesame" not in text
