import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.errors import StorageError
from titan_tune.study import journal, storage


def study_at(path):
    sampler = optuna.samplers.RandomSampler(seed=0)
    return storage.create_or_load("s", storage.storage_url(path.parent, str(path)), sampler=sampler)


def add(study, value):
    study.add_trial(optuna.trial.create_trial(value=value))


def values(study):
    return [trial.value for trial in study.get_trials()]


@given(content=st.lists(st.sampled_from([b"{}\n", b"x" * 70_000, b"ab", b"\n", b'{"a":1}\n'])).map(b"".join))
def test_mending_keeps_whole_lines_and_what_it_cuts(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("journal") / "s.journal"
    path.write_bytes(content)
    whole, newline, torn = content.rpartition(b"\n")
    assert journal.mend(path) == len(torn)
    assert path.read_bytes() == whole + newline
    aside = path.with_name("s.journal.torn")
    assert aside.read_bytes() == torn + b"\n" if torn else not aside.exists()
    assert journal.mend(path) == 0


def test_a_torn_last_line_is_cut_off_when_the_study_is_opened(tmp_path, fault_row):
    path = tmp_path / "s.journal"
    add(study_at(path), 1.0)
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"gone","trial_id":0,"us')
    study = study_at(path)
    add(study, 2.0)
    assert values(study_at(path)) == values(study) == [1.0, 2.0]
    assert b'"gone"' in (tmp_path / "s.journal.torn").read_bytes()
    fault_row(
        "Study",
        "journal with half a last line (a writer was killed)",
        "the line was cut off under the journal's lock and kept beside it",
        "every whole entry is there, and new ones follow",
    )


def test_a_line_torn_while_the_study_is_open_does_not_take_the_next_one_along(tmp_path):
    path = tmp_path / "s.journal"
    one, other = study_at(path), study_at(path)
    add(one, 1.0)
    with path.open("ab") as file:
        file.write(b'{"op_code":')
    add(other, 2.0)
    add(one, 3.0)
    assert values(one) == values(other) == values(study_at(path)) == [1.0, 2.0, 3.0]


def test_a_lock_left_by_a_writer_that_is_gone_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "LOCK_GRACE_SECONDS", 3)
    path = tmp_path / "s.journal"
    add(study_at(path), 1.0)
    (tmp_path / "s.journal.lock").touch()
    study = study_at(path)
    add(study, 2.0)
    assert values(study) == [1.0, 2.0]
    assert not (tmp_path / "s.journal.lock").exists()


def test_a_journal_that_is_none_is_one_clear_line(tmp_path):
    path = tmp_path / "s.log"
    path.write_text("step 1 loss 2.0\nstep 2 loss 1.9\n")
    with pytest.raises(
        StorageError, match=r"journal:///.*s\.log: cannot use the study storage: Expecting value"
    ):
        study_at(path)
    assert path.read_text() == "step 1 loss 2.0\nstep 2 loss 1.9\n"
