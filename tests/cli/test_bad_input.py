"""Bad input: one clear line on stderr, the contract's exit code, no traceback."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys

import pytest

from titan_tune.cli import run

JOB = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
seq_len = 256
local_batch_size = 4
"""
SPACE = """
[base.model]
name = "llama3"
flavor = "debugmodel"
[base.training]
seq_len = 256
local_batch_size = 4
[cluster]
gpu = "h200"
gpus_per_node = 2
[axes]
compile = ["off", "default"]
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "space.toml").write_text(SPACE)
    (tmp_path / "broken.toml").write_text("[model\nname=1")
    (tmp_path / "latin.toml").write_bytes(b"# \xff\xfe")
    (tmp_path / "key.toml").write_text(JOB + "local_batch_sise = 3\n")
    (tmp_path / "section.toml").write_text(JOB + "[trainign]\nsteps = 3\n")
    (tmp_path / "type.toml").write_text(JOB.replace("256", '"256"'))
    (tmp_path / "flavor.toml").write_text(JOB.replace("debugmodel", "8b"))
    (tmp_path / "degrees.toml").write_text(JOB + "[parallelism]\ntensor_parallel_degree = 3\n")
    (tmp_path / "axis.toml").write_text(SPACE + 'activation_chekpoint = ["none"]\n')
    (tmp_path / "value.toml").write_text(SPACE + 'float8 = ["tensorwize"]\n')
    (tmp_path / "probe.toml").write_text(SPACE + "[probe]\nstep = 3\n")
    (tmp_path / "axess.toml").write_text(SPACE.replace("[axes]", "[axess]"))
    (tmp_path / "nobase.toml").write_text('[axes]\ncompile = ["off"]\n')
    return tmp_path


def one_line(capsys) -> str:
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["estimate", "missing.toml"], 2, ["missing.toml", "no such file"]),
        (["estimate", "."], 2, ["directory"]),
        (["estimate", "broken.toml"], 2, ["broken.toml", "line 1"]),
        (["estimate", "latin.toml"], 2, ["latin.toml", "UTF-8"]),
        (["estimate", "key.toml"], 2, ["key.toml", "local_batch_sise", "local_batch_size"]),
        (["estimate", "section.toml"], 2, ["section.toml", "trainign", "training"]),
        (["estimate", "type.toml"], 2, ["type.toml", "training.seq_len", "256"]),
        (["estimate", "flavor.toml"], 2, ["flavor.toml", "8b", "8B", "debugmodel"]),
        (["estimate", "job.toml", "--set", "training.stepps=3"], 2, ["training.stepps", "training.steps"]),
        (["estimate", "job.toml", "--set", "training.steps"], 2, ["--set", "training.steps"]),
        (["estimate", "job.toml", "--gpu", "h2000"], 2, ["h2000", "h200"]),
        (["estimate", "job.toml", "--gpus", "12"], 2, ["--gpus", "12", "8"]),
        (["estimate", "job.toml", "--gpus", "0"], 2, ["--gpus", "(given: 0)"]),
        (["estimate", "job.toml", "--gpus", "8", "--nodes", "2"], 2, ["--gpus", "--nodes"]),
        (["estimate", "job.toml", "--method", "magic"], 2, ["--method", "magic", "formula"]),
        (["estimate", "job.toml", "--sweep", "nonsense"], 2, ["--sweep", "nonsense"]),
        (["estimate", "job.toml", "--hf-config", "none.json"], 2, ["none.json", "no such file"]),
        (["estimate", "space.toml"], 2, ["space.toml", "is a search space", "--plan"]),
        (["search", "missing.toml"], 2, ["missing.toml", "no such file"]),
        (["search", "axis.toml"], 2, ["axis.toml", "activation_chekpoint", "activation_checkpoint"]),
        (["search", "value.toml"], 2, ["value.toml", "float8", "tensorwize", "tensorwise"]),
        (["search", "probe.toml"], 2, ["probe.toml", "step", "steps"]),
        (["search", "nobase.toml"], 2, ["nobase.toml", "base"]),
        (["search", "axess.toml"], 2, ["axess.toml", "unknown key 'axess' (did you mean axes?)"]),
        (["estimate", "axess.toml"], 2, ["axess.toml", "is a search space"]),
        (["search", "job.toml", "--runner", "cloud"], 2, ["--runner", "cloud", "local"]),
        (["search", "job.toml", "--max-gpu-hours", "0"], 2, ["--max-gpu-hours", "0 is not a number above 0"]),
        (["search", "job.toml", "--max-hours", "nan"], 2, ["--max-hours", "nan is not a number above 0"]),
        (["search", "job.toml", "--study", "a/b"], 2, ["--study", "'a/b' is not a plain name"]),
        (["search", "job.toml", "--study", ""], 2, ["--study", "'' is not a plain name"]),
        (["search", "job.toml", "--storage", "foo"], 2, ["--storage: foo", ".journal", "postgresql://"]),
        (
            ["search", "job.toml", "--storage", "oracel://u:secret@h/d"],
            2,
            ["oracel://u:***@h/d", "sqlite:///"],
        ),
        (
            ["search", "job.toml", "--storage", "postgresql://u:secret@h:po/d"],
            2,
            ["--storage", "a port is a number"],
        ),
        (["search", "job.toml", "--runs-dir", "job.toml"], 2, ["--runs-dir", "job.toml is a file"]),
        (["estimate", "job.toml", "--set", "model.flavor=9B"], 2, ["--set model.flavor=9B", "debugmodel"]),
        (["search", "space.toml", "--set", "model.flavor=9B"], 2, ["--set model.flavor=9B", "debugmodel"]),
        (["export", "nothing"], 2, ["nothing", "no such study"]),
        (["export", "nothing", "--format", "yaml"], 2, ["--format", "yaml", "toml"]),
        (["report", "nothing"], 2, ["nothing", "no such study"]),
        (["export", "job.toml"], 2, ["job.toml: is a file, not a study", "name or its folder"]),
        (["report", "./job.toml"], 2, ["job.toml: is a file, not a study"]),
        (["export", ""], 2, ["STUDY: is empty"]),
        (
            ["export", "s", "--runs-dir", "nodir"],
            2,
            ["nodir/s: no such study", "--runs-dir nodir: there is no"],
        ),
        (["report", "s", "--runs-dir", "job.toml"], 2, ["no such study", "--runs-dir job.toml: is a file"]),
        (["diagnose", "nothing.log"], 2, ["nothing.log"]),
        (["frobnicate"], 2, ["frobnicate"]),
        (["estimate"], 2, ["JOB"]),
        (["search", "space.toml", "--max-probes", "many"], 2, ["--max-probes", "(given: many)"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0].islower() else None,
)
def test_one_clear_line(files, capsys, arguments, code, words):
    assert run(arguments) == code
    line = one_line(capsys)
    assert line.startswith("titan-tune: ")
    for word in words:
        assert word in line
    assert "secret" not in line
    assert not (files / "runs").exists()


def test_the_command_alone_prints_the_help(capsys):
    assert run([]) == 2
    printed = capsys.readouterr().err
    assert run(["-h"]) == 0
    assert capsys.readouterr().out == printed
    assert "Commands:\n  estimate " in printed and "--debug" in printed
    assert run(["estimate", "-h"]) == 0


@pytest.mark.parametrize(
    "arguments", [["diagnose", "-h"], ["estimate", "job.toml", "--gpus", "8", "--gpu", "h200", "--json"]]
)
@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_a_closed_pipe_ends_as_for_other_tools_and_says_nothing(files, arguments, closed):
    code = f"from titan_tune.cli import main; main({arguments!r})"
    reading, writing = os.pipe()
    os.close(reading)
    error = writing if closed == "both" else subprocess.PIPE
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=error, cwd=files)
    os.close(writing)
    assert done.returncode == 141
    assert not done.stderr


def test_impossible_degrees_are_exit_code_3_with_the_rule(files, capsys):
    assert run(["estimate", "degrees.toml", "--gpus", "8", "--gpu", "h200"]) == 3
    text = capsys.readouterr().out
    assert "tensor_parallel_degree" in text and "Traceback" not in text


def test_a_file_that_names_no_model_is_told_so(files, capsys):
    (files / "empty.toml").write_text("")
    assert run(["estimate", "empty.toml", "--gpus", "8", "--gpu", "h200", "--json"]) == 0
    line = one_line(capsys)
    assert line == "empty.toml: names no model; torchtitan's default is llama3 debugmodel"
    assert run(["estimate", "job.toml", "--gpus", "8", "--gpu", "h200", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_search_on_a_machine_without_the_gpus_of_the_space(files, capsys):
    assert run(["search", "space.toml"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "this machine has" in line and "--runner slurm" in line


def test_the_plan_needs_no_gpu(files, capsys):
    assert run(["search", "space.toml", "--plan"]) == 0
    assert "4 combinations" not in capsys.readouterr().out


def test_a_corrupt_study_database(files, capsys):
    folder = files / "runs" / "s"
    folder.mkdir(parents=True)
    (folder / "study.db").write_bytes(b"rubbish" * 1000)
    assert run(["export", "s"]) == 2
    assert "study.db: cannot use the study storage: file is not a database" in one_line(capsys)


def test_a_locked_study_database(files, capsys, monkeypatch):
    from titan_tune.study import storage

    monkeypatch.setattr(storage, "SQLITE_TIMEOUT_SECONDS", 0.1)
    folder = files / "runs" / "s"
    folder.mkdir(parents=True)
    holder = sqlite3.connect(folder / "study.db", isolation_level=None)
    holder.execute("create table t (a int)")
    holder.execute("BEGIN EXCLUSIVE")
    try:
        assert run(["export", "s"]) == 2
    finally:
        holder.close()
    assert "study.db: cannot use the study storage: database is locked" in one_line(capsys)


def test_a_full_disk_is_one_line_and_exit_code_4(files, capsys, monkeypatch):
    from titan_tune.study import storage

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/search.lock")

    monkeypatch.setattr(storage, "study_directory", full)
    (files / "cpu.toml").write_text(SPACE.replace('gpu = "h200"', 'gpu = "cpu"'))
    assert run(["search", "cpu.toml"]) == 4
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "No space left on device" in line and "runs/x/search.lock" in line


def test_export_does_not_overwrite_somebody_elses_file(files, capsys):
    from titan_tune.cli.export import write_file
    from titan_tune.errors import InputError

    mine = files / "mine.toml"
    mine.write_text("# precious\n")
    with pytest.raises(InputError, match=r"mine\.toml exists and was not written by titan-tune; --force"):
        write_file(mine, "# titan-tune x\n", force=False)
    assert mine.read_text() == "# precious\n"
    write_file(mine, "# titan-tune x\n", force=True)
    write_file(mine, "# titan-tune y\n", force=False)
    assert mine.read_text() == "# titan-tune y\n"


def test_internal_errors_are_one_line_unless_debug(files, capsys, monkeypatch):
    import titan_tune.machine

    def broken():
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(titan_tune.machine, "local_cluster", broken)
    assert run(["search", "job.toml"]) == 1
    assert "internal error: ZeroDivisionError: oops" in one_line(capsys)
    with pytest.raises(ZeroDivisionError):
        run(["search", "job.toml", "--debug"])


@pytest.mark.parametrize("arguments", [["export", "s"], ["report", "s"], ["search", "job.toml"]])
def test_without_the_probe_extra_the_message_names_it(files, arguments):
    code = (
        "import sys; sys.modules['optuna'] = None\n"
        "import importlib.util as u; found = u.find_spec; u.find_spec = lambda n: None if n == 'optuna' else found(n)\n"
        f"from titan_tune.cli import run; sys.exit(run({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=files)
    assert done.returncode == 2
    assert "optuna" in done.stderr and "pip install 'titan-tune[probe]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_estimate_imports_no_torch_and_no_optuna(files):
    code = (
        "import sys; from titan_tune.cli import run; run(['estimate', 'job.toml', '--gpu', 'h200', '--gpus', '8']);"
        "print(sorted({'torch', 'torchtitan', 'optuna', 'numpy', 'torchao'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=files)
    assert done.stdout.strip().splitlines()[-1] == "[]"
