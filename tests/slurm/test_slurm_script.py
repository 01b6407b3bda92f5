"""The scripts as text, and as bash runs them with stand-ins for srun and scontrol. No Slurm is needed."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_tune.errors import InputError
from titan_tune.probe.slurm.batch import here_document
from titan_tune.probe.slurm.script import EXIT_NO_FOLDER, expanding, sbatch_script, step_script
from titan_tune.probe.slurm.settings import Container, SlurmSettings

STAND_INS = {
    # what srun is given, as JSON; then it runs the task as srun would on one node
    "srun": f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
with open(os.environ["SEEN"], "w") as file:
    json.dump({{"words": words, "hostile": os.environ.get("HOSTILE")}}, file)
task = next(i for i, word in enumerate(words) if not word.startswith("-"))
os.execvp(words[task], words[task:])
""",
    "scontrol": "#!/bin/sh\necho node7\necho node8\n",
    "launcher": "#!/bin/sh\nexit 0\n",
}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
LINE = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=40)


@pytest.fixture
def bash(tmp_path):
    """Run a script; what srun was given."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(script):
        environ = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SEEN": str(tmp_path / "seen.json"),
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "node[7-8]",
        }
        done = subprocess.run(
            ["bash"], input=script, env=environ, text=True, capture_output=True, cwd=tmp_path
        )
        seen = tmp_path / "seen.json"
        return done, json.loads(seen.read_text()) if seen.exists() else None

    return run


def script(tmp_path, **changes):
    given_ = {
        "job_name": "name",
        "nodes": 2,
        "gpus_per_node": 8,
        "settings": SlurmSettings(python="launcher"),
        "command": ["-m", "torchtitan.train"],
        "environment": {},
        "stdout": tmp_path / "out.log",
        "workdir": tmp_path,
        "time_minutes": 30,
    }
    return sbatch_script(**{**given_, **changes})


def options(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_options_of_a_job(tmp_path):
    site = SlurmSettings(
        partition="h100", account="ml", qos="high", constraint="nvlink", reservation="r", gpu_type="h100",
        cpus_per_task=96, mem="0", exclusive=True, exclude=("node1",),
        extra_sbatch_lines=("#SBATCH --comment=x", "-L a"),
    )  # fmt: skip
    text = script(tmp_path, settings=site, exclude=["node2", "node1"])
    assert options(text) == [
        "--job-name=name", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=h100:8", "--partition=h100",
        "--account=ml", "--qos=high", "--constraint=nvlink", "--reservation=r", "--cpus-per-task=96", "--mem=0",
        "--exclude=node1,node2", "--time=30", f"--output={tmp_path}/out.log", f"--chdir={tmp_path}", "--no-requeue",
        "--exclusive", "--comment=x", "-L a",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("site", "gpus", "asked"),
    [
        (SlurmSettings(), 4, ["--gpus-per-node=4"]),
        (SlurmSettings(gpus="gres", gpu_type="a100"), 4, ["--gres=gpu:a100:4"]),
        (SlurmSettings(gpus="none"), 4, []),
        (SlurmSettings(), 0, []),
    ],
)
def test_how_gpus_are_asked_for(tmp_path, site, gpus, asked):
    text = script(tmp_path, settings=site, gpus_per_node=gpus, nproc_per_node=4)
    assert [
        option for option in options(text) if "g" in option.partition("=")[0] and "gpu" in option
    ] == asked


def test_no_time_limit_is_the_partitions(tmp_path):
    assert not any(option.startswith("--time") for option in options(script(tmp_path, time_minutes=None)))


def test_bash_launches_torchrun_across_nodes(tmp_path, bash):
    done, seen = bash(script(tmp_path))
    assert done.returncode == 0, done.stderr
    assert seen["words"] == [
        "--kill-on-bad-exit=1", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1",
        "launcher", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=8", "--rdzv-id=123456",
        "--rdzv-backend=c10d", "--rdzv-endpoint=node7:23456", "-m", "torchtitan.train",
    ]  # fmt: skip


def test_one_node_takes_a_free_port(tmp_path, bash):
    _, seen = bash(script(tmp_path, nodes=1))
    assert seen["words"][4:9] == [
        "launcher",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=8",
    ]


def test_containers(tmp_path, bash):
    pyxis = Container(
        runtime="pyxis",
        image="nvcr.io#a/b:1",
        mounts=("/a:/a", "/b:/b"),
        arguments=("--container-remap-root",),
    )
    _, seen = bash(script(tmp_path, settings=SlurmSettings(python="launcher", container=pyxis)))
    assert seen["words"][4:8] == [
        "--container-image=nvcr.io#a/b:1", "--container-mounts=/a:/a,/b:/b", "--container-remap-root", "launcher",
    ]  # fmt: skip
    apptainer = Container(runtime="apptainer", image="a b.sif", mounts=("/a:/a",), arguments=("--cleanenv",))
    text = script(tmp_path, settings=SlurmSettings(python="launcher", container=apptainer))
    assert "apptainer exec --nv --bind=/a:/a --cleanenv 'a b.sif' launcher -m torch.distributed.run" in text
    assert "'a b.sif' python3 -m torch" in script(tmp_path, settings=SlurmSettings(container=apptainer))
    assert f"{sys.executable} -m torch" in script(tmp_path, settings=SlurmSettings())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(argument=TEXT, value=TEXT, comment=LINE)
def test_bash_takes_every_string_as_it_is(tmp_path, bash, argument, value, comment):
    (tmp_path / "seen.json").unlink(missing_ok=True)
    site = SlurmSettings(python="launcher", srun_arguments=(f"--comment={comment}",))
    text = script(tmp_path, settings=site, command=[argument, value], environment={"HOSTILE": value})
    done, seen = bash(text)
    assert seen is not None, done.stderr
    assert seen["words"][4] == f"--comment={comment}"
    assert seen["words"][-2:] == [argument, value]
    assert seen["hostile"] == value


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(text=LINE)
def test_an_option_line_stays_one_line(tmp_path, text):
    """sbatch's own rules: blanks split, quotes join, a backslash takes the next character as it is."""
    lines = script(tmp_path, job_name=text).split("\n")
    (line,) = [line for line in lines if line.startswith("#SBATCH --job-name=")]
    assert sbatch_words(line.removeprefix("#SBATCH ")) == [f"--job-name={text}"]


def sbatch_words(line):
    """As sbatch's ``_get_argument`` splits a line (src/sbatch/opt.c)."""
    words, word, quote, escaped, inside = [], "", "", False, False
    for character in line:
        if escaped:
            word, escaped = word + character, False
        elif character == "\\":
            escaped = inside = True
        elif quote:
            if character == quote:
                quote = ""
            else:
                word += character
        elif character in "\"'":
            quote, inside = character, True
        elif character in " \t":
            if inside:
                words.append(word)
            word, inside = "", False
        else:
            word, inside = word + character, True
    return [*words, word] if inside else words


@pytest.mark.parametrize("field", ["job_name", "workdir", "stdout"])
def test_what_would_break_out_of_an_option_line_is_refused(tmp_path, field):
    hostile = f"{tmp_path}/x\n#SBATCH --wrap=evil"
    with pytest.raises(InputError, match="control characters"):
        script(tmp_path, **{field: hostile if field == "job_name" else Path(hostile)})


def test_file_name_patterns_are_no_patterns(tmp_path):
    assert f"--output={tmp_path}/%%j/%%x.log" in options(script(tmp_path, stdout=tmp_path / "%j" / "%x.log"))
    with pytest.raises(InputError, match="backslash"):
        script(tmp_path, stdout=tmp_path / "a\\b")


def test_a_variable_needs_a_name_of_bash(tmp_path):
    with pytest.raises(InputError, match="no name of an environment variable"):
        script(tmp_path, environment={"A=1; touch x; B": "c"})


def test_a_missing_folder_ends_the_job_with_its_own_code(tmp_path, bash):
    done, seen = bash(script(tmp_path, workdir=tmp_path / "not there's"))
    assert (done.returncode, seen) == (EXIT_NO_FOLDER, None)
    assert f"has no folder {tmp_path}/not there's" in done.stderr


def test_set_up_lines_come_before_the_variables(tmp_path, bash):
    site = SlurmSettings(python="launcher", setup=("export HOSTILE=site",))
    _, seen = bash(script(tmp_path, settings=site))
    assert seen["hostile"] == "site"
    _, seen = bash(script(tmp_path, settings=site, environment={"HOSTILE": "own"}))
    assert seen["hostile"] == "own"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$SCRATCH/a b", "/s c/a b"),
        ("${SCRATCH}x$(touch canary)", "/s cx$(touch canary)"),
        ("a'b\"$", "a'b\"$"),
        ("", ""),
    ],
)
def test_only_variables_are_expanded(tmp_path, text, value):
    command = f"printf %s {expanding(text)}"
    done = subprocess.run(
        ["bash", "-c", command], env={"SCRATCH": "/s c"}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == value
    assert not (tmp_path / "canary").exists()


def test_an_unset_variable_ends_the_script():
    done = subprocess.run(
        ["bash", "-c", f"x={expanding('$NOT_SET/a')}; echo on"], capture_output=True, text=True, env={}
    )
    assert (done.returncode != 0, done.stdout) == (True, "")


def test_the_cache_folder_is_made_for_the_user_alone(tmp_path, bash):
    cache = tmp_path / "a b" / "cache"
    done, _ = bash(script(tmp_path, cache_directory=str(cache)))
    assert done.returncode == 0, done.stderr
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_step_passes_on_the_exit_code_and_ends_with_its_input(tmp_path, bash):
    (tmp_path / "launcher").write_text("#!/bin/sh\nexit 7\n")
    text = step_script(
        name="tt-x", nodes=("node7", "node8"), port=20001, nproc_per_node=4, step_options=["--exact"],
        settings=SlurmSettings(python="launcher"), command=["-m", "x y"], environment={"HOSTILE": "'"},
        workdir=tmp_path, cache_directory=str(tmp_path / "cache"),
    )  # fmt: skip
    path = tmp_path / "step.sh"
    path.write_text(text)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SEEN": str(tmp_path / "seen.json"), "SLURM_JOB_ID": "1"}
    with subprocess.Popen(["bash", str(path)], env=environ, stdin=subprocess.PIPE) as process:
        assert process.wait(20) == 7
    words = json.loads((tmp_path / "seen.json").read_text())["words"]
    assert {"--job-name=tt-x", "--nodelist=node7,node8", "--exact", "--nodes=2"} <= set(words)
    assert "--rdzv-endpoint=node7:20001" in words
    (tmp_path / "launcher").write_text("#!/bin/sh\nexec sleep 1000\n")
    with subprocess.Popen(["bash", str(path)], env=environ, stdin=subprocess.PIPE) as process:
        process.stdin.close()
        assert process.wait(20) != 0


def test_the_command_to_run_a_trial_again_is_one_command(tmp_path):
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat > {shlex.quote(str(tmp_path / 'submitted'))}\n")
    (tmp_path / "sbatch").chmod(0o755)
    text = script(tmp_path, command=["$(touch canary)", "END_", "'"])
    subprocess.run(
        ["bash", "-c", here_document(text)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=tmp_path,
        check=True,
    )
    assert (tmp_path / "submitted").read_text() == text
    assert not (tmp_path / "canary").exists()
