"""``titan-tune export``: what each format writes, what it says of its figures, what it warns of and refuses."""

from __future__ import annotations

import json
import stat
import subprocess
import tomllib

import pytest

from tests.export.small_studies import info, make_study, measurement
from titan_tune.cli import run
from titan_tune.domain.probe import Origin, RankMemory
from titan_tune.units import GIB


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sbatch_lines(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_toml_is_the_users_own_with_the_winning_values(folder, capsys):
    make_study(folder / "runs", "s")
    assert run(["export", "s"]) == 0
    text = (folder / "best.toml").read_text()
    assert "# the user's own comment" in text
    assert tomllib.loads(text)["activation_checkpoint"]["mode"] == "full"
    assert "# measured: 7,000 tokens/s per GPU, 95 % interval 6,930 to 7,070, 1 run(s)" in text
    assert "# gain: +16.7 % over the job as it was (6,000 tokens/s per GPU)" in text
    assert "7,000 tokens/s per GPU (measured)" in capsys.readouterr().err


def test_a_dry_run_is_not_called_measured(folder, capsys):
    make_study(folder / "runs", "s", best=measurement(7000.0, origin=Origin.DRY_RUN))
    assert run(["export", "s"]) == 0
    text = (folder / "best.toml").read_text()
    assert "# dry run: 7,000 tokens/s per GPU, interval 6,930 to 7,070, 1 run(s)" in text
    assert "# not measured on all GPUs" in text and "# measured:" not in text
    assert "7,000 tokens/s per GPU (dry run)" in capsys.readouterr().err


def test_one_dry_run_among_the_runs_that_count_is_enough(folder):
    from titan_tune.study.open import open_study
    from titan_tune.study.selection import Standing

    make_study(folder / "runs", "s", best=measurement(7000.0, origin=Origin.DRY_RUN))
    base, dry = open_study("s", storage=None, runs_dir=folder / "runs").records
    assert Standing("x", (base,), final=False).origin is Origin.MEASURED
    assert Standing("x", (base, dry), final=False).origin is Origin.DRY_RUN


def test_the_command_names_a_file_that_is_there(folder, capsys):
    make_study(folder / "runs", "s")
    assert run(["export", "s", "--format", "command", "-o", "mine.toml"]) == 0
    line = capsys.readouterr().out.strip()
    assert line.endswith(
        "torchrun --standalone --nproc-per-node=8 -m torchtitan.train --job.config_file mine.toml"
    )
    assert (folder / "mine.toml").exists()


def test_sbatch_writes_a_script_and_the_toml_it_runs(folder, capsys):
    slurm = {
        "partition": "gpu",
        "account": "me",
        "time": "10",
        "setup": ["module load cuda"],
        "python": "/venv/python",
    }
    make_study(folder / "runs", "s", study_info=info(nodes=4, slurm=slurm))
    assert run(["export", "s", "--format", "sbatch", "-o", "out/job.sh"]) == 0
    script, toml = (folder / "out" / "job.sh").read_text(), folder / "out" / "job.toml"
    assert tomllib.loads(toml.read_text())["activation_checkpoint"]["mode"] == "full"
    assert script.startswith("#!/bin/bash\n# titan-tune ")
    options = sbatch_lines(script)
    assert {"--nodes=4", "--gpus-per-node=8", "--partition=gpu", "--account=me", "--job-name=job"} <= set(
        options
    )
    assert f"--output={folder}/out/job.log" in options and f"--chdir={folder}" in options
    assert not [option for option in options if option.startswith("--time")], "the table's limit is a probe's"
    assert "module load cuda" in script and "PYTORCH_ALLOC_CONF=expandable_segments:True" in script
    assert "/venv/python -m torch.distributed.run" in script and "--nnodes=4" in script
    assert f"--job.config_file {toml}" in script
    assert stat.S_IMODE((folder / "out" / "job.sh").stat().st_mode) & stat.S_IXUSR
    assert subprocess.run(["bash", "-n", "out/job.sh"]).returncode == 0
    assert "submit it: sbatch out/job.sh" in capsys.readouterr().err


def test_sbatch_of_a_cpu_study_asks_for_no_gpus(folder):
    make_study(folder / "runs", "s", study_info=info(cpu=True, nodes=2, per_node=2))
    assert run(["export", "s", "--format", "sbatch"]) == 0
    script = (folder / "best.sh").read_text()
    assert not [option for option in sbatch_lines(script) if "gpu" in option]
    assert "--nproc-per-node=2" in script and "PYTORCH_ALLOC_CONF" not in script


def test_sbatch_named_after_a_toml_gets_a_script_beside_it(folder):
    make_study(folder / "runs", "s")
    assert run(["export", "s", "--format", "sbatch", "-o", "x.toml"]) == 0
    assert (folder / "x.sh").read_text().startswith("#!/bin/bash")
    assert tomllib.loads((folder / "x.toml").read_text())


def test_sbatch_of_a_pareto_front(folder):
    make_study(folder / "runs", "s")
    assert run(["export", "s", "--format", "sbatch", "--pareto"]) == 0
    assert sorted(path.suffix for path in (folder / "front").iterdir()) == [".sh", ".toml"]


def test_files_of_others_are_not_replaced_but_our_own_are(folder, capsys):
    make_study(folder / "runs", "s")
    (folder / "best.sh").write_text("#!/bin/bash\necho mine\n")
    assert run(["export", "s", "--format", "sbatch"]) == 2
    assert "best.sh exists and was not written by titan-tune; --force" in capsys.readouterr().err
    assert (folder / "best.sh").read_text() == "#!/bin/bash\necho mine\n"
    assert run(["export", "s", "--format", "sbatch", "--force"]) == 0
    assert run(["export", "s", "--format", "sbatch"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "yaml"], ["--format", "'yaml'", "toml, command, sbatch, python"]),
        (["-o", "."], ["-o", "is a folder"]),
        (["--trial", "7"], ["--trial", "no trial 7", "0, 1"]),
        (["--trial", "0", "--pareto"], ["exclude each other"]),
    ],
)
def test_what_cannot_be_exported_is_one_line(folder, capsys, arguments, words):
    make_study(folder / "runs", "s")
    assert run(["export", "s", *arguments]) == 2
    line = capsys.readouterr().err
    assert len(line.splitlines()) == 1 and all(word in line for word in words)


def test_a_slurm_table_of_another_version_is_one_line(folder, capsys):
    make_study(folder / "runs", "s", study_info=info(slurm={"partitoin": "x"}))
    assert run(["export", "s", "--format", "sbatch"]) == 2
    assert "study s: slurm: unknown key 'partitoin' (did you mean partition?)" in capsys.readouterr().err


def test_a_winner_that_fails_a_trend_check_is_exported_with_the_warning(folder, capsys):
    trend = {"step_jitter": 0.4, "slow_steps": 3, "alloc_retries": 0, "late_alloc_retries": 0, "ooms": 0}
    make_study(folder / "runs", "s", details={"trend": trend})
    assert run(["export", "s", "--format", "sbatch"]) == 0
    said = capsys.readouterr().err
    assert "warning: trend check fail: step time: the middle 80 % of steps span 40.0 % of the median" in said
    for name in ("best.toml", "best.sh"):
        assert "# trend check: fail: step time: " in (folder / name).read_text()


def test_a_sound_winner_has_no_warning(folder, capsys):
    trend = {"step_jitter": 0.01, "slow_steps": 0, "alloc_retries": 0, "late_alloc_retries": 0, "ooms": 0}
    make_study(folder / "runs", "s", details={"trend": trend})
    assert run(["export", "s"]) == 0
    assert "trend check" not in capsys.readouterr().err
    assert "trend check" not in (folder / "best.toml").read_text()


def exported_json(capsys, *arguments):
    assert run(["export", "s", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_json_has_the_file_the_configuration_and_its_figures(folder, capsys):
    make_study(folder / "runs", "s")
    document, said = exported_json(capsys)
    assert (document["schema"], document["study"], document["format"]) == (1, "s", "toml")
    (found,) = document["exports"]
    assert found["files"] == ["best.toml"] and (folder / "best.toml").exists()
    assert "wrote best.toml" in said and "run it: " in said
    assert found["command"][-2:] == ["--job.config_file", "best.toml"]
    assert (found["config_id"], found["trial"], found["is_baseline"]) == ("full-id", 1, False)
    assert found["choices"] == {"activation_checkpoint": "full"}
    assert found["overrides"] == {"activation_checkpoint.mode": {"before": "selective", "after": "full"}}
    assert (found["origin"], found["tokens_per_second_per_gpu"]) == ("measured", 7000.0)
    assert found["gain_over_baseline"] == pytest.approx(1 / 6) and found["gain_origin"] == "measured"
    assert found["memory"] == {
        "kind": "cuda",
        "peak_active_gib": 40,
        "peak_reserved_gib": 44,
        "peak_device_gib": 46,
    }
    assert found["predicted"] == {"tokens_per_second_per_gpu": 6500.0, "active_gib": 41.0}
    assert (found["needs_titan_tune"], found["torchtitan"]) == ([], "0.2.2")


def test_json_of_the_job_as_it_was_has_no_gain(folder, capsys):
    make_study(folder / "runs", "s")
    (found,) = exported_json(capsys, "--trial", "0")[0]["exports"]
    assert found["is_baseline"] and found["gain_over_baseline"] is None and found["overrides"] == {}


def test_json_of_a_dry_run_says_so(folder, capsys):
    make_study(folder / "runs", "s", best=measurement(7000.0, origin=Origin.DRY_RUN))
    (found,) = exported_json(capsys)[0]["exports"]
    assert (found["origin"], found["gain_origin"]) == ("dry run", "dry run")


@pytest.mark.parametrize(
    ("format_name", "files", "command"),
    [
        ("command", ["best.toml"], ["--job.config_file", "best.toml"]),
        ("sbatch", ["best.sh", "best.toml"], ["sbatch", "best.sh"]),
        ("python", ["best.py"], ["--config", "llama3_8b_tuned"]),
    ],
)
def test_json_is_all_that_stdout_gets_whatever_the_format(folder, capsys, format_name, files, command):
    make_study(folder / "runs", "s")
    (found,) = exported_json(capsys, "--format", format_name)[0]["exports"]
    assert found["files"] == files and all((folder / name).exists() for name in files)
    assert found["command"][-2:] == command
    assert found["torchtitan"] == ("0.3.0" if format_name == "python" else "0.2.2")


def test_json_has_a_row_for_each_of_a_front(folder, capsys):
    larger = (RankMemory(0, 50 * GIB, 60 * GIB, 61 * GIB),)
    make_study(folder / "runs", "s", best=measurement(7000.0, memory=larger))
    document, _ = exported_json(capsys, "--pareto")
    assert [row["files"] for row in document["exports"]] == [
        ["front/full-id.toml"],
        ["front/selective-2-id.toml"],
    ]


def test_json_has_the_warnings_and_what_has_to_be_installed(folder, capsys):
    trend = {"step_jitter": 0.4, "slow_steps": 3, "alloc_retries": 0, "late_alloc_retries": 0, "ooms": 0}
    make_study(folder / "runs", "s", study_info=info(cpu=True, per_node=2), details={"trend": trend})
    (found,) = exported_json(capsys)[0]["exports"]
    assert any("trend check fail: step time" in warning for warning in found["warnings"])
    assert found["needs_titan_tune"] == ["torchtitan itself does not start without an accelerator"]
    (recipe,) = exported_json(capsys, "--format", "python")[0]["exports"]
    assert any("not carried over: the study ran on CPU" in warning for warning in recipe["warnings"])
