"""The whole of it on CPU: real torchtitan probes, killed and interrupted, resumed, exported, and the export run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from titan_tune.study.open import open_study
from titan_tune.study.records import Role

pytestmark = [pytest.mark.torchtitan, pytest.mark.timeout(1200)]

SPACE = """
# a comment of the user's own
[base.model]
name = "llama3"
flavor = "tiny"
[base.titan_tune]
data = "synthetic"
[base.titan_tune.model_args]
dim = 64
n_layers = 2
n_heads = 4
vocab_size = 512
[base.training]
seq_len = 64
local_batch_size = 2
steps = 50
[base.lr_scheduler]
warmup_steps = 2
[cluster]
gpu = "cpu"
gpus_per_node = 2
[axes]
activation_checkpoint = ["selective-2", "none"]
parallelism = [{ dp_shard = 2 }, { dp_replicate = 2 }]
[budget]
max_probes = 4
[probe]
steps = 5
warmup_steps = 2
min_measured_steps = 3
finalists = 1
"""


MARK = "SEARCH_TEST_FOLDER"
"""A variable of a search, and of everything that it starts or forks."""


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "titan_tune", "search", "space.toml", "--study", "s", *more]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, MARK: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def trial_processes(folder: Path) -> list[psutil.Process]:
    """Live processes of this test's searches, other than a search itself. A fork has its parent's command line:
    its environment tells."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get(MARK) == str(folder) and "space.toml" not in process.cmdline()
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition, seconds: float = 120.0) -> None:
    """Poll; the limit only bounds a broken run."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.2)


def metrics_lines(folder: Path) -> int:
    return sum(len(p.read_text().splitlines()) for p in folder.glob("runs/s/trials/*/metrics.rank0.jsonl"))


def records(folder: Path):
    return open_study("s", storage=None, runs_dir=folder / "runs").records


def test_killed_interrupted_resumed_exported_and_run(tmp_path):
    (tmp_path / "space.toml").write_text(SPACE)

    # SIGKILL of the search while its first probe trains: nothing survives it
    search = start(tmp_path)
    wait_until(lambda: metrics_lines(tmp_path) >= 1)
    assert len(trial_processes(tmp_path)) >= 4  # zygote, supervisor and two ranks
    search.kill()
    search.communicate()
    wait_until(lambda: not trial_processes(tmp_path), 60)

    # Ctrl-C during the next probe: state saved, exit code 130, nothing survives
    search = start(tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("runs/s/trials/*"))) >= 2 and trial_processes(tmp_path))
    wait_until(lambda: any(p.name.startswith("metrics") for p in tmp_path.glob("runs/s/trials/*-2/*")))
    search.send_signal(signal.SIGINT)
    text, _ = search.communicate(timeout=120)
    assert search.returncode == 130, text
    assert "the same command resumes" in text and "Traceback" not in text
    assert not trial_processes(tmp_path)

    # the same command goes on to the end
    search = start(tmp_path)
    text, _ = search.communicate(timeout=400)
    assert search.returncode == 0, text
    found = records(tmp_path)
    statuses = [str(r.outcome.status) for r in found]
    assert statuses.count("cancelled") == 2
    done = [r for r in found if r.measurement]
    assert [r.role for r in done] == [Role.BASELINE, Role.PROBE, Role.FINALIST, Role.FINALIST]
    assert {r.outcome.details["launcher"] for r in done} == {"preloaded"}
    assert all(len(r.measurement.memory) == 2 and r.measurement.memory_kind == "rss" for r in done)
    for record in done:
        folder = tmp_path / "runs" / "s" / record.directory
        names = {p.name for p in folder.iterdir()}
        assert {"config.toml", "command.txt", "environment.json", "stdout.log", "outcome.json"} <= names
        assert {"metrics.rank0.jsonl", "metrics.rank1.jsonl"} <= names

    # and once more: nothing left to do, nothing run
    again = subprocess.run(
        [sys.executable, "-m", "titan_tune", "search", "space.toml", "--study", "s", "--json"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(json.loads(again.stdout)["trials"]) == len(found)

    export_and_run(tmp_path)


def export_and_run(folder: Path) -> None:
    """The exported file is accepted by torchtitan's own ConfigManager and trains by the printed command."""
    export = [sys.executable, "-m", "titan_tune", "export", "s", "-o", "best.toml"]
    subprocess.run(export, cwd=folder, check=True, capture_output=True)
    text = (folder / "best.toml").read_text()
    assert text.startswith("# titan-tune ") and "# measured: " in text and "# launch: torchrun" in text
    assert "steps = 50" in text
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "-m", "torchtitan.train", "--job.config_file", "best.toml",
            "--training.steps", "3", "--metrics.log_freq", "1",
        ],
        cwd=folder, capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    assert "step:  3" in log and "Training completed" in log
    report = [sys.executable, "-m", "titan_tune", "report", "s", "-o", "pages"]
    subprocess.run(report, cwd=folder, check=True, capture_output=True)
    assert (folder / "pages" / "s.html").stat().st_size > 10_000
