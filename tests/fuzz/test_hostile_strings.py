"""Strings that a shell, sbatch or TOML would take for more than text, in every place that reaches a script or command.

What is written is run by a real bash: the arguments must arrive as they were, and nothing else may happen.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.export.small_studies import JOB, info, make_study, measurement
from titan_tune.cli import run
from titan_tune.cli.report import export_command
from titan_tune.domain.probe import ProbeSettings, ProbeSpec
from titan_tune.errors import InputError
from titan_tune.export import Export, command_text, launch_command
from titan_tune.export_sbatch import export_sbatch, job_name
from titan_tune.probe import launch
from titan_tune.probe.slurm.settings import SlurmSettings
from titan_tune.study import storage
from titan_tune.titan.job import job_from_text, render

HOSTILE = (
    "a b",
    " leading and trailing ",
    "it's",
    'double " quote',
    "$(touch canary)",
    "`touch canary`",
    "x; touch canary",
    "x && touch canary &",
    "x | touch canary",
    "> canary",
    "$HOME ${PATH} $MASTER_ADDR",
    "=$MASTER_ADDR:29500",
    "'; touch canary; '",
    '"; touch canary; "',
    "-rf",
    "--help",
    "*?[a-z]{a,b}~",
    "# comment",
    "!! !$",
    "%j %%",
    "é 数据 \U0001f600",
)
UNPRINTABLE = (
    "new\nline",
    "#SBATCH --wrap=x\n#SBATCH --uid=0",
    "car\rriage",
    "tab\there",
    "bell\x07",
    "esc\x1b[31m",
)
BACKSLASHES = ("back\\slash", "trailing\\")


@dataclass(frozen=True)
class Call:
    """How the recorder was called."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str


class Recorder:
    """A program that writes down how it is called, under any name in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin with space"
        self.record = folder / "record"
        self.folder.mkdir()
        self.record.mkdir()

    def install(self, name: str, *, prints: str = "") -> Path:
        program = self.folder / name
        place = shlex.quote(str(self.record / name))
        program.write_text(
            f"#!/bin/bash\nprintf '%s\\0' \"$@\" > {place}.arguments\nenv -0 > {place}.environment\n"
            f"printf '%s' \"$PWD\" > {place}.folder\n" + (f"echo {prints}\n" if prints else "")
        )
        program.chmod(0o755)
        return program

    def call(self, name: str) -> Call:
        def parts(kind: str) -> list[str]:
            return (self.record / f"{name}.{kind}").read_bytes().decode().split("\0")[:-1]

        pairs = (entry.partition("=") for entry in parts("environment"))
        folder = (self.record / f"{name}.folder").read_bytes().decode()
        return Call(parts("arguments"), {key: value for key, _, value in pairs}, folder)

    def bash(self, script: str, folder: Path, **environment: str) -> None:
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env={"PATH": f"{self.folder}:{os.environ['PATH']}", "HOME": "/nonexistent", **environment},
            check=True,
            timeout=60,
            capture_output=True,
        )


@pytest.fixture
def recorder(tmp_path) -> Recorder:
    return Recorder(tmp_path)


@pytest.fixture(autouse=True)
def no_canary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.rglob("canary"))


def folder_named(parent: Path, text: str) -> Path:
    folder = parent / f"d{text.replace('/', '_')}"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("text", [*HOSTILE, *UNPRINTABLE, *BACKSLASHES])
def test_the_exported_command_runs_the_file_it_names(recorder, tmp_path, text):
    recorder.install("torchrun")
    for name in (Path(text.replace("/", "_")), tmp_path / text / "best.toml"):
        recorder.bash(command_text(launch_command(name, num_nodes=1, gpus_per_node=8)), tmp_path)
        call = recorder.call("torchrun")
        assert call.arguments[:-1] == [
            "--standalone", "--nproc-per-node=8", "-m", "torchtitan.train", "--job.config_file",
        ]  # fmt: skip
        assert call.arguments[-1].removeprefix("./") == str(name)
        assert not call.arguments[-1].startswith("-")
        assert call.environment["PYTORCH_ALLOC_CONF"] == launch.ALLOCATOR


@pytest.mark.parametrize("text", ["best.toml", "=$MASTER_ADDR:29500", "$(touch canary)=$MASTER_ADDR:29500"])
def test_only_the_rendezvous_is_expanded(recorder, tmp_path, text):
    recorder.install("torchrun")
    line = command_text(launch_command(Path(text), num_nodes=2, gpus_per_node=8))
    recorder.bash(line, tmp_path, MASTER_ADDR="head node; touch canary")
    arguments = recorder.call("torchrun").arguments
    assert "--rdzv-endpoint=head node; touch canary:29500" in arguments
    assert arguments[-1] == text


@pytest.mark.parametrize("text", [*HOSTILE, *UNPRINTABLE, *BACKSLASHES])
def test_command_txt_runs_the_trial_again(recorder, tmp_path, monkeypatch, text):
    here = folder_named(tmp_path, text)
    monkeypatch.chdir(here)
    spec = ProbeSpec(
        config_id="abc", directory=here / "runs" / text.replace("/", "_"), toml="", nproc_per_node=2, device="cuda",
        settings=ProbeSettings(), cache_directory=here / "cache", tokens_per_step_per_rank=1.0,
        environment=(("EXTRA", text),),
    )  # fmt: skip
    command = [str(recorder.install(f"p{text.replace('/', '_')}")), *launch.torchrun_command(spec)[1:]]
    environment = launch.probe_environment(spec, "probe", {})
    recorder.bash(launch.command_text(command, environment, {}), tmp_path)
    call = recorder.call(Path(command[0]).name)
    assert call.arguments == command[1:]
    assert call.folder == str(here)
    assert call.environment["EXTRA"] == text
    assert call.environment["TITAN_TUNE_CACHE_DIR"] == str(here / "cache")


def script_for(text: str, tmp_path: Path, *, nodes: int = 1, **settings: object) -> tuple[str, Path, Path]:
    """The exported script where folder, file and study are named ``text``."""
    workdir = folder_named(tmp_path, text)
    toml = workdir / f"{text.replace('/', '_')}.toml"
    exported = Export("", (), False, comments=("titan-tune x", f"study {text}"))
    script = export_sbatch(
        exported, info(nodes=nodes), SlurmSettings(python="python3", **settings),  # type: ignore[arg-type]
        toml=toml, log=workdir / "job.log", workdir=workdir,
    )  # fmt: skip
    return script, toml, workdir


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("text", HOSTILE)
def test_the_exported_script_launches_the_file_it_names(recorder, tmp_path, text, nodes):
    recorder.install("srun")
    recorder.install("scontrol", prints="node1")
    script, toml, workdir = script_for(text, tmp_path, nodes=nodes)
    recorder.bash(script, tmp_path, SLURM_JOB_ID="1234", SLURM_JOB_NODELIST="node[1-2]")
    call = recorder.call("srun")
    assert call.folder == str(workdir)
    assert call.arguments[-3:] == ["torchtitan.train", "--job.config_file", str(toml)]
    assert f"--nodes={nodes}" in call.arguments and "--nproc-per-node=8" in call.arguments
    assert ("--rdzv-endpoint=node1:21234" in call.arguments) is (nodes == 2)
    assert call.environment["PYTORCH_ALLOC_CONF"] == launch.ALLOCATOR


@pytest.mark.parametrize("text", ["partition; touch canary", "$(touch canary)", 'quo"te', "a b"])
def test_site_settings_stay_options_of_their_own(recorder, tmp_path, text):
    recorder.install("srun")
    script, _, _ = script_for("plain", tmp_path, partition=text, account=text, srun_arguments=(text,))
    recorder.bash(script, tmp_path, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="node1")
    assert text in recorder.call("srun").arguments
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert sum(line.startswith("#SBATCH --partition=") for line in options) == 1


@pytest.mark.parametrize("text", [*UNPRINTABLE, *BACKSLASHES])
def test_what_no_sbatch_line_can_hold_is_refused(tmp_path, text):
    with pytest.raises(InputError, match=r"^[^\n]+$"):
        script_for(text, tmp_path)


def test_comments_add_no_sbatch_options(tmp_path, recorder):
    make_study(tmp_path / "runs", "s", study_info=info(job_name="x\n#SBATCH --uid=0\n$(touch canary)"))
    assert run(["export", "s", "--format", "sbatch", "-o", "job.sh"]) == 0
    script = (tmp_path / "job.sh").read_text()
    assert not [line for line in script.splitlines() if line.startswith("#SBATCH --uid")]


@pytest.mark.parametrize("text", [*HOSTILE, *UNPRINTABLE, *BACKSLASHES])
def test_job_names_are_plain(text):
    assert set(job_name(text)) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    assert not job_name(text).startswith("-") and job_name(text)


@pytest.mark.parametrize("text", [text for text in HOSTILE if "?" not in text])
def test_study_names_are_folders_and_nothing_else(recorder, tmp_path, text, capsys):
    make_study(tmp_path / "runs", text)
    assert run(["export", "--runs-dir", "runs", "-o", "best.toml", "--", text]) == 0
    exported = (tmp_path / "best.toml").read_text()
    assert tomllib.loads(exported)["activation_checkpoint"]["mode"] == "full"
    assert f"study {text}, trial 1" in exported
    recorder.install("titan-tune")
    recorder.bash(export_command(text, storage=None, runs_dir=Path("runs")), tmp_path)
    assert recorder.call("titan-tune").arguments[:2] == ["export", text] or text.startswith("-")
    assert (tmp_path / "runs" / text / "study.db").is_file()


def test_a_question_mark_ends_no_database_url_early(tmp_path):
    with pytest.raises(InputError, match=r"a\?b: a path with '\?' cannot hold"):
        storage.storage_url(tmp_path / "a?b", None)


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "../up", "/tmp/x", "nul\0", *UNPRINTABLE])
def test_names_that_are_no_plain_folder_are_refused(tmp_path, text):
    with pytest.raises(InputError, match=r"--study"):
        storage.study_directory(tmp_path, text)


@pytest.mark.parametrize("text", [*HOSTILE, *UNPRINTABLE, *BACKSLASHES])
def test_files_of_any_name_are_read(tmp_path, text, capsys):
    name = text.replace("/", "_")
    (tmp_path / name).write_text(JOB)
    assert run(["estimate", "--gpu", "h100-80gb", "--gpus", "8", "--", name]) == 0
    (tmp_path / name).write_text("nonsense")
    assert run(["estimate", "--", name]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and all(c.isprintable() for c in said.rstrip("\n"))


@pytest.mark.parametrize("text", [*HOSTILE, *UNPRINTABLE, *BACKSLASHES, "nul\0", "del\x7f", "'''", '"""'])
@pytest.mark.parametrize("key", ["model.hf_assets_path", "training.dataset_path", "job.description"])
def test_values_come_through_the_exported_file_unchanged(text, key):
    job = job_from_text(JOB, name="job")
    section, name = key.split(".")
    written = render(job, {key: text}, comments=[f"was {text}"])
    assert tomllib.loads(written)[section][name] == text


def test_hostile_output_names_give_files_that_parse(tmp_path, capsys):
    make_study(tmp_path / "runs", "s", best=measurement(7000.0))
    for text in (*HOSTILE, *UNPRINTABLE, *BACKSLASHES):
        name = f"{text.replace('/', '_')}.toml"
        assert run(["export", "s", f"--output={name}"]) == 0
        assert tomllib.loads((tmp_path / name).read_text())["model"]["flavor"] == "8B"
