import json
from pathlib import Path

import optuna
import pytest

from tests.report.studies import full_study, info
from titan_tune.cli.report import export_command, run_report
from titan_tune.errors import InputError
from titan_tune.probe.record import outcome_to_dict
from titan_tune.study import storage as store
from titan_tune.study.records import Attr


def save(runs, name, study_info, records):
    """A study on disk as a search leaves it."""
    directory = store.study_directory(runs, name)
    directory.mkdir(parents=True)
    study = store.create_or_load(
        name, store.storage_url(directory, None), sampler=optuna.samplers.RandomSampler()
    )
    study.set_user_attr(Attr.STUDY, study_info.model_dump(mode="json"))
    for record in records:
        attrs = {
            Attr.ROLE: record.role,
            Attr.CONFIG_ID: record.config_id,
            Attr.DIRECTORY: str(record.directory),
            Attr.VALUES: dict(record.values),
            Attr.PREDICTED: dict(record.predicted),
            Attr.OUTCOME: outcome_to_dict(record.outcome),
        }
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE
                if record.measurement
                else optuna.trial.TrialState.FAIL,
                value=record.tokens_per_second,
                params=dict(record.choices),
                distributions={
                    axis: optuna.distributions.CategoricalDistribution(study_info.axes[axis])
                    for axis in record.choices
                },
                user_attrs=attrs,
            )
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs that no test writes to."""
    folder = tmp_path_factory.mktemp("runs")
    save(folder, "llama", *full_study())
    return folder


def report(runs, output, study="llama", as_json=False):
    return run_report(study, output=output, storage=None, runs_dir=runs, as_json=as_json)


def test_writes_both_files_and_prints_the_summary(runs, tmp_path, capsys):
    output = tmp_path / "a" / "reports"
    assert report(runs, output) == 0
    page, text = output / "llama.html", output / "llama.md"
    assert page.read_text().startswith("<!doctype html>") and "+30.4 %" in page.read_text()
    assert "## The answer" in text.read_text()
    assert page.stat().st_mode & 0o777 == 0o644
    captured = capsys.readouterr()
    assert "8,350" in captured.out and "best:" in captured.out
    assert str(page) in captured.err and str(text) in captured.err
    assert sorted(p.name for p in output.iterdir()) == ["llama.html", "llama.md"]


def test_json_is_alone_on_stdout_and_holds_the_whole_report(runs, tmp_path, capsys):
    assert report(runs, tmp_path / "r", as_json=True) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out, parse_constant=lambda name: pytest.fail(name))
    assert data["schema"] == 1
    assert data["answer"]["tokens_per_second"] == 8350.0
    assert data["method"]["probe"]["steps"] == 25
    assert len(data["trials"]) == len(full_study()[1])
    assert data["files"] == [str(tmp_path / "r" / "llama.html"), str(tmp_path / "r" / "llama.md")]
    assert "best:" in captured.err


def test_a_report_is_replaced_by_the_next_one(runs, tmp_path):
    assert report(runs, tmp_path) == 0
    assert report(runs, tmp_path) == 0


@pytest.mark.parametrize("name", ["llama.html", "llama.md"])
def test_a_file_of_the_user_is_left_alone(runs, tmp_path, name):
    (tmp_path / name).write_text("my notes\n")
    with pytest.raises(InputError, match="exists and is not a titan-tune report"):
        report(runs, tmp_path)
    assert (tmp_path / name).read_text() == "my notes\n"
    assert len(list(tmp_path.glob("llama.*"))) == 1


def test_output_must_be_a_folder(runs, tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="is a file; name a folder"):
        report(runs, tmp_path / "x")


def test_an_unknown_study_names_those_that_exist(runs, tmp_path):
    with pytest.raises(InputError, match=r"did you mean llama\?"):
        report(runs, tmp_path, study="lama")


def test_a_study_without_a_measurement_reports_and_says_so(tmp_path, capsys):
    study_info, records = full_study()
    save(tmp_path / "runs", "bad", study_info, [r for r in records if r.measurement is None])
    assert report(tmp_path / "runs", tmp_path / "r", study="bad") == 0
    assert "There is no result: none of 4 probes was measured." in (tmp_path / "r" / "bad.html").read_text()
    assert "not measured" in capsys.readouterr().out


def test_a_study_without_a_probe_reports(tmp_path):
    save(tmp_path / "runs", "empty", info(), [])
    assert report(tmp_path / "runs", tmp_path / "r", study="empty", as_json=True) == 0
    assert "no probe has finished" in (tmp_path / "r" / "empty.md").read_text()


def test_a_study_can_be_named_by_its_folder(runs, tmp_path):
    assert report(tmp_path, tmp_path / "r", study=str(runs / "llama")) == 0
    assert f"titan-tune export {runs / 'llama'} -o best.toml" in (tmp_path / "r" / "llama.md").read_text()


def test_the_export_command_finds_the_study_again():
    assert export_command("s", storage=None, runs_dir=Path("runs")) == "titan-tune export s -o best.toml"
    assert export_command("a b;c", storage=None, runs_dir=Path("x y")) == (
        "titan-tune export 'a b;c' -o best.toml --runs-dir 'x y'"
    )


def test_the_export_command_keeps_the_password_out():
    command = export_command("s", storage="postgresql://me:secret@host/db", runs_dir=Path("runs"))
    assert "secret" not in command and "postgresql://me:***@host/db" in command
