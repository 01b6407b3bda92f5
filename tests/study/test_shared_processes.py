"""Searches of several processes on one study, in a real PostgreSQL or a journal file: nothing lost or doubled."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest
import scripted_search as scripted

from titan_tune.study import storage
from titan_tune.study.records import Attr, records_of

pytestmark = pytest.mark.timeout(1800)
SCRIPT = Path(scripted.__file__)


class Group:
    """Searches of one study, each a process; ``url`` as a user gives it."""

    def __init__(self, folder: Path, url: str):
        self.folder, self.url = folder / "runs" / scripted.STUDY, url
        self.folder.mkdir(parents=True)
        self.processes: list[subprocess.Popen[str]] = []
        self.killed: list[subprocess.Popen[str]] = []

    def start(self, count: int = 1, **options: object) -> list[subprocess.Popen[str]]:
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        new = [
            subprocess.Popen(
                [sys.executable, SCRIPT, self.folder, self.url, "--seed", str(len(self.processes) + i), *flags],
                stdout=(self.folder / f"search{len(self.processes) + i}.log").open("w"),
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(count)
        ]  # fmt: skip
        self.processes += new
        return new

    def log(self, index: int) -> str:
        return (self.folder / f"search{index}.log").read_text()

    def started(self) -> list[str]:
        path = self.folder / scripted.STARTED
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def study(self) -> optuna.Study:
        return storage.load(scripted.STUDY, storage.storage_url(self.folder, self.url))

    def wait(self) -> None:
        for index, process in enumerate(self.processes):
            code = process.wait(1700)
            assert code == 0 or process in self.killed, self.log(index)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL, as part of the test."""
        process.kill()
        process.wait()
        self.killed.append(process)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def check(self, candidates: int, *, restarted: int = 0) -> None:
        """Every candidate and the baseline measured once; ``restarted`` probes were begun and lost with a search."""
        trials = self.study().get_trials(deepcopy=False)
        assert [t.number for t in trials] == list(range(len(trials)))
        assert all(t.state.is_finished() for t in trials)
        measured = [r for r in records_of(self.study()) if r.measurement]
        times = Counter(r.config_id for r in measured)
        assert len(times) == candidates + 1 and set(times.values()) == {1}
        assert all(r.tokens_per_second == scripted.speed(r.config_id) for r in measured)
        assert len(self.started()) == candidates + 1 + restarted
        folders = [t.user_attrs[Attr.DIRECTORY] for t in trials if Attr.WITHDRAWN not in t.user_attrs]
        assert len(folders) == len(set(folders))


@pytest.fixture
def group(tmp_path, request):
    made: list[Group] = []

    def make(kind: str) -> Group:
        url = (
            request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "study.journal")
        )
        made.append(Group(tmp_path, url))
        return made[-1]

    yield make
    for each in made:
        each.end()


STORAGES = [pytest.param("postgres", marks=pytest.mark.postgres), "journal"]


def wait_until(condition, seconds: float = 300.0) -> None:
    """Poll; the limit only bounds a broken run."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORAGES)
def test_eight_searches_measure_a_thousand_candidates_once_each(group, fault_row, kind):
    shared = group(kind)
    shared.start(8, candidates=1000)
    shared.wait()
    shared.check(1000)
    told = [sum(line.startswith("told") for line in shared.log(i).splitlines()) for i in range(8)]
    assert min(told) > 0
    withdrawn = sum(Attr.WITHDRAWN in t.user_attrs for t in shared.study().get_trials(deepcopy=False))
    fault_row(
        "Study",
        f"8 searches, one study of 1,000 candidates ({kind})",
        f"{withdrawn} claims of what another search had claimed first were withdrawn before their probe",
        "1,001 probes started, each recorded once",
    )


@pytest.mark.parametrize("kind", STORAGES)
def test_a_search_that_is_killed_is_survived_by_the_others(group, fault_row, kind):
    shared = group(kind)
    first, *_ = shared.start(3, candidates=60, seconds=0.3)
    wait_until(lambda: len(shared.started()) >= 10 and "told" in shared.log(0))
    shared.kill(first)
    shared.wait()
    # it had at most one probe in flight; a sleep ends with its process, and is begun again by another search
    restarted = len(shared.started()) - 61
    assert restarted in (0, 1)
    shared.check(60, restarted=restarted)
    fault_row(
        "Study",
        f"one of 3 searches SIGKILLed ({kind})",
        "the others found its process gone and gave its probe up",
        "its probe ran again elsewhere; 61 configurations recorded once each",
    )


@pytest.mark.parametrize("kind", STORAGES)
def test_a_search_killed_again_and_again_resumes(group, fault_row, kind):
    shared = group(kind)
    for goal in (3, 8, 14):
        (search,) = shared.start(candidates=20, seconds=0.1, slots=2)
        wait_until(lambda goal=goal: len(shared.started()) >= goal)
        shared.kill(search)
    shared.start(candidates=20, seconds=0.1, slots=2)
    shared.wait()
    restarted = len(shared.started()) - 21
    assert 0 <= restarted <= 6
    shared.check(20, restarted=restarted)
    fault_row(
        "Study",
        f"search SIGKILLed three times and resumed ({kind})",
        "what had ended was told from its folder, what had not was given up",
        "21 configurations recorded once each",
    )


@pytest.mark.postgres
def test_a_server_that_stops_and_starts_again_loses_nothing(group, postgres_server, fault_row):
    shared = group("postgres")
    shared.start(3, candidates=60, seconds=0.2)
    wait_until(lambda: len(shared.started()) >= 12)
    postgres_server.stop()
    try:
        wait_until(lambda: all("storage unreachable" in shared.log(i) for i in range(3)))
    finally:
        postgres_server.start()
    shared.wait()
    assert all("the storage is back; nothing was lost" in shared.log(i) for i in range(3))
    shared.check(60)
    fault_row(
        "Study",
        "PostgreSQL stopped and started again under 3 searches",
        "each said so, kept what ended meanwhile, and told it afterwards",
        "61 configurations recorded once each",
    )


@pytest.mark.parametrize("kind", STORAGES)
def test_four_searches_create_one_study(group, fault_row, kind):
    shared = group(kind)
    shared.start(4, candidates=10)
    shared.wait()
    shared.check(10)
    assert len(optuna.get_all_study_summaries(shared.study()._storage)) == 1
    fault_row(
        "Study",
        f"4 searches started at once on an empty storage ({kind})",
        "all came through",
        "one study, 11 configurations recorded once each",
    )
