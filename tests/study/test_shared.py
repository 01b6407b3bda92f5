"""Two searches of one study in one process, turn by turn, so that every race happens on purpose."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
import scripted_search as scripted
from optuna.trial import TrialState, create_trial

from titan_tune.domain.probe import ProbeOutcome, ProbeProgress, ProbeStatus
from titan_tune.errors import InterruptedSearchError, ProbesFailedError, StorageError
from titan_tune.probe.record import read_outcome, write_outcome
from titan_tune.space.axes import Budget
from titan_tune.study import choose, outage, storage
from titan_tune.study import ledger as ledger_module
from titan_tune.study.lease import Fate
from titan_tune.study.ledger import Ledger
from titan_tune.study.records import Attr, Role, records_of
from titan_tune.study.selection import finalists


class Quiet:
    def __init__(self):
        self.notes, self.told, self.snapshot = [], [], None

    def update(self, snapshot):
        self.snapshot = snapshot

    def finished(self, record, label):
        self.told.append(record.number)

    def note(self, text):
        self.notes.append(text)


class Shared:
    """A study, and searches of it; each ``search`` is a new one."""

    def __init__(self, tmp_path, url, plan):
        self.root, self.url, self.plan = tmp_path, url, plan
        self.searches = []

    def search(self, *, folder="disk", runner=None, **options):
        directory = self.root / folder
        directory.mkdir(exist_ok=True)
        made = scripted.scripted_search(
            self.plan, directory, self.url, view=Quiet(), lease=options.pop("lease", 60.0), **options
        )
        made._pace = replace(made._pace, poll=0.0, watch=0.0)
        made._ledger.owner.enter()
        self.searches.append(made)
        return made

    def die(self, search):
        """What SIGKILL leaves: nothing is cleaned up."""
        search._ledger.owner.leave()

    def study(self):
        return storage.load(scripted.STUDY, self.url)

    def records(self):
        return records_of(self.study())

    def started(self):
        files = self.root.glob(f"*/{scripted.STARTED}")
        return [line.split()[0] for file in files for line in file.read_text().splitlines()]


@pytest.fixture
def shared(tmp_path, request):
    """A journal, which is quick; ``indirect`` gives the plan's options."""
    options = getattr(request, "param", {})
    budget = options.get("budget", Budget())
    plan = scripted.scripted_plan(
        options.get("candidates", 20), tmp_path, finalists=options.get("finalists", 0)
    )
    plan = replace(plan, space=replace(plan.space, budget=budget))
    made = Shared(tmp_path, f"journal://{tmp_path / 'study.journal'}", plan)
    yield made
    for search in made.searches:
        search._ledger.owner.leave()


def turn_by_turn(*searches):
    for search in searches:
        search._resume()
    busy = True
    while busy:
        turns = [search._advance() for search in searches]
        busy = any(turns)


def test_two_searches_share_the_work(shared):
    one, two = shared.search(seed=1), shared.search(seed=2)
    turn_by_turn(one, two)
    assert Counter(r.config_id for r in shared.records() if r.measurement) == Counter(list(shared.plan.by_id))
    assert len(shared.started()) == 21
    # each shows what the other one told, too
    assert sorted(one._view.told) == sorted(two._view.told) == [r.number for r in shared.records()]


def test_of_two_that_want_the_same_the_lower_number_has_it(shared):
    one, two = shared.search(seed=5), shared.search(seed=5)
    one._resume(), two._resume()
    while not any(r.role is Role.BASELINE for r in shared.records()):
        one._advance()
    real, raced = one._ledger.claim, []

    def claim(choices, attrs):
        if not raced:  # the other search claims between this one's choice and its claim
            raced.append(attrs[Attr.CONFIG_ID])
            two._advance()
        return real(choices, attrs)

    one._ledger.claim = claim
    turn_by_turn(one, two)
    trials = [t for t in shared.study().get_trials() if t.user_attrs[Attr.CONFIG_ID] == raced[0]]
    assert [Attr.WITHDRAWN in t.user_attrs for t in trials] == [False, True]
    assert shared.started().count(raced[0]) == 1 and len(shared.started()) == 21
    assert not [t for t in trials if t.user_attrs[Attr.DIRECTORY] and t.state is TrialState.RUNNING]
    withdrawn = shared.root / "disk" / trials[1].user_attrs[Attr.DIRECTORY]
    assert not withdrawn.exists()


@pytest.mark.parametrize(
    "shared",
    [
        {"budget": Budget(max_probes=7), "finalists": 2},
        {"budget": Budget(max_probes=1)},
        {"budget": Budget(max_gpu_hours=9 / 3600), "finalists": 1},
    ],
    indirect=True,
)
def test_two_searches_with_slots_keep_one_budget(shared, monkeypatch):
    monkeypatch.setattr(choose, "FIRST_PROBE_SECONDS", 1.0)
    one, two = shared.search(seed=1, slots=3), shared.search(seed=2, slots=2)
    turn_by_turn(one, two)
    budget = shared.plan.space.budget
    limit = budget.max_probes or round(budget.max_gpu_hours * 3600)  # a scripted probe takes a second
    assert len(shared.started()) == len(shared.records()) <= limit
    assert len(shared.started()) >= limit - 3


@pytest.mark.parametrize("shared", [{"finalists": 3, "budget": Budget(max_probes=14)}], indirect=True)
def test_the_finals_begin_when_no_search_explores_any_more(shared):
    turn_by_turn(shared.search(seed=1, slots=2), shared.search(seed=2, slots=2))
    records = shared.records()
    roles = [r.role for r in records]
    first = roles.index(Role.FINALIST)
    assert set(roles[first:]) == {Role.FINALIST}
    expected = {records[0].config_id, *finalists(records[:first], count=3)}
    assert Counter(r.config_id for r in records[first:]) == Counter(expected)


def in_flight(search):
    """Advance until it has a probe in flight; its number."""
    while not search._flights:
        search._advance()
    return search._flights[0].number


def test_an_outcome_that_comes_after_its_trial_was_given_up_counts_once(shared):
    late, other = shared.search(seconds=0.5), shared.search(seed=2)
    late._resume()
    number = in_flight(late)
    other._resume()
    other._ledger.give_up(number)
    assert [r.outcome.status for r in shared.records()] == [ProbeStatus.CANCELLED]
    while late._flights:
        late._advance()
    late._advance()
    (heir,) = (r for r in shared.records() if r.adopts == number)
    assert heir.measurement and heir.tokens_per_second == scripted.speed(heir.config_id)
    assert number not in [r.number for r in shared.records()]
    turn_by_turn(late, other)
    assert sum(r.config_id == heir.config_id for r in shared.records() if r.measurement) == 1


def test_two_searches_that_find_the_same_dead_one_tell_its_result_once(shared):
    dead, one, two = shared.search(seconds=60.0), shared.search(seed=2), shared.search(seed=3)
    dead._resume()
    number = in_flight(dead)
    flight = dead._flights[0]
    write_outcome(flight.directory, scripted.outcome_of(flight.handle.spec))
    shared.die(dead)
    one._ledger.refresh(), two._ledger.refresh()
    (held,) = two._ledger.abandoned()
    one._recover()
    two._recover_one(held)
    assert [(r.number, bool(r.measurement)) for r in shared.records()] == [(number, True)]
    assert len(shared.study().get_trials()) == 1


def test_a_result_on_a_disk_that_the_finder_could_not_see_is_found_by_the_next_search_that_can(shared):
    dead, elsewhere = shared.search(seconds=60.0), shared.search(folder="other-disk", seed=2)
    dead._resume()
    number = in_flight(dead)
    write_outcome(dead._flights[0].directory, scripted.outcome_of(dead._flights[0].handle.spec))
    shared.die(dead)
    elsewhere._resume()
    assert [r.outcome.status for r in shared.records()] == [ProbeStatus.CANCELLED]
    for _ in range(2):
        shared.search(seed=3)._resume()
    assert [(r.adopts, bool(r.measurement)) for r in shared.records()] == [(number, True)]
    assert len(shared.study().get_trials()) == 2


def test_two_heirs_of_one_trial_count_once(shared):
    dead, elsewhere = shared.search(seconds=60.0), shared.search(folder="other-disk")
    dead._resume()
    number = in_flight(dead)
    outcome = scripted.outcome_of(dead._flights[0].handle.spec)
    shared.die(dead)
    elsewhere._resume()
    one, two = shared.search(), shared.search()
    one._ledger.refresh(), two._ledger.refresh()
    two._ledger.refresh = lambda: None  # it has not seen what the first one adds
    one._ledger.find_again(number, outcome)
    two._ledger.find_again(number, outcome)
    assert len(shared.study().get_trials()) == 3
    assert [r.adopts for r in shared.records()] == [number]


def test_a_trial_of_another_machine_is_given_up_when_its_lease_runs_out(shared, monkeypatch):
    monkeypatch.setattr(ledger_module, "fate", lambda owner, me: Fate.ELSEWHERE)
    now = [0.0]
    dead, other = shared.search(seconds=60.0), shared.search(seed=2)
    other._ledger._clock = lambda: now[0]
    dead._resume()
    number = in_flight(dead)
    shared.die(dead)
    other._resume()
    while now[0] < 59.0:
        now[0] += 10.0
        other._advance()
        running = other._ledger.running
        assert (number in [h.number for h in running]) == (now[0] < 60.0)
    other._advance()
    assert shared.study().get_trials()[number].state is TrialState.FAIL


def test_a_lease_is_renewed_while_the_probe_runs_and_not_after_it_was_taken_over(shared):
    one = shared.search(seconds=60.0)
    one._resume()
    number = in_flight(one)
    beats = []
    for _ in range(3):
        one._next_renewal = one._next_exchange = 0.0
        one._advance()
        beats.append(shared.study().get_trials()[number].user_attrs[Attr.LEASE]["beat"])
    assert beats == sorted(set(beats))
    other = shared.search()
    other._ledger.refresh()
    other._ledger.take_over(number)
    one._next_renewal = one._next_exchange = 0.0
    one._advance()
    lease = shared.study().get_trials()[number].user_attrs[Attr.LEASE]
    assert lease["owner"]["token"] == other._ledger.owner.token


class Cluster:
    """Jobs that no search owns; ``ended`` is what each came to, by folder."""

    def __init__(self):
        self.jobs, self.ended, self.cancelled = {}, {}, []


class JobHandle:
    def __init__(self, cluster, spec):
        self.cluster, self.spec = cluster, spec

    def poll(self):
        outcome = self.cluster.ended.get(self.spec.directory.name)
        if outcome:
            write_outcome(self.spec.directory, outcome)
        return outcome

    def progress(self):
        return ProbeProgress("step", 0, 5, None, 3.0)

    def cancel(self):
        name = self.spec.directory.name
        self.cluster.cancelled.append(name)
        self.cluster.ended[name] = ProbeOutcome(ProbeStatus.CANCELLED, "scancel", 3.0)
        return self.poll()


class Jobs:
    """A runner of a scheduler, in short."""

    name = "jobs"

    def __init__(self, cluster, slots=2):
        self.cluster, self.slots, self.handles = cluster, slots, []

    def start(self, spec):
        self.cluster.jobs[spec.directory.name] = spec
        self.handles.append(JobHandle(self.cluster, spec))
        return self.handles[-1]

    def attach(self, spec):
        if spec.directory.name not in self.cluster.jobs:
            return None
        self.handles.append(JobHandle(self.cluster, self.cluster.jobs[spec.directory.name]))
        return self.handles[-1]

    def detach(self):
        self.handles = []

    def close(self):
        for handle in self.handles:
            if handle.poll() is None:
                handle.cancel()


@pytest.fixture
def jobs(shared, monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(scripted, "SleepingRunner", lambda *_, slots, **__: Jobs(cluster, slots))
    return cluster


def interrupted(search, *, after: int, leave=None):
    """Run it, and press Ctrl-C at the given turn."""
    turns, real = [0], search._advance

    def advance():
        turns[0] += 1
        if turns[0] > after:
            raise KeyboardInterrupt
        return real()

    search._advance = advance
    if leave is not None:
        search._leave = leave
    with pytest.raises(InterruptedSearchError) as caught:
        search.run()
    return str(caught.value)


def finish(cluster):
    for name, spec in cluster.jobs.items():
        cluster.ended.setdefault(name, scripted.outcome_of(spec))


def test_jobs_left_on_ctrl_c_are_found_by_the_same_command(shared, jobs):
    asked = []
    text = interrupted(shared.search(), after=3, leave=lambda probes: asked.append(probes) or True)
    assert asked == [1] and "1 probe left running; the same command resumes" in text
    assert not jobs.cancelled and len(jobs.jobs) == 1
    (left,) = shared.study().get_trials()
    assert left.state is TrialState.RUNNING and left.user_attrs[Attr.LEASE]["released"]

    again = shared.search()
    again._resume()
    assert [f.number for f in again._flights] == [0] and len(jobs.jobs) == 1
    finish(jobs)
    while again._flights or len(jobs.jobs) < 21:
        again._advance()
        finish(jobs)
    turn_by_turn(again)
    assert Counter(r.config_id for r in shared.records()) == Counter(list(shared.plan.by_id))
    assert len(jobs.jobs) == 21 and not jobs.cancelled


@pytest.mark.parametrize("leave", [None, lambda probes: False])
def test_jobs_are_cancelled_on_ctrl_c_unless_they_are_to_stay(shared, jobs, leave):
    text = interrupted(shared.search(), after=3, leave=leave)
    assert len(jobs.cancelled) == 1 and "left" not in text
    assert [r.outcome.status for r in shared.records()] == [ProbeStatus.CANCELLED]


def test_jobs_of_a_search_that_was_killed_are_found_or_told(shared, jobs):
    dead = shared.search(slots=2)
    dead._resume()
    in_flight(dead)
    finish(jobs)
    while len(dead._flights) < 2:
        dead._advance()
    names = [f.directory.name for f in dead._flights]
    jobs.ended[names[0]] = scripted.outcome_of(jobs.jobs[names[0]])  # it ends while nobody looks
    shared.die(dead)
    again = shared.search(slots=2)
    again._resume()
    assert sorted(f.directory.name for f in again._flights) == sorted(names)
    again._advance()
    assert [r.measurement is not None for r in shared.records()] == [True, True]
    assert len(jobs.jobs) == 4 and not jobs.cancelled  # the two, their baseline, and the next one


def test_a_search_that_cannot_see_the_jobs_leaves_them_alone(shared, jobs, monkeypatch):
    interrupted(shared.search(), after=3, leave=lambda probes: True)
    other = shared.search(folder="other-disk")
    other._resume()
    assert not other._flights
    assert [t.state for t in shared.study().get_trials()] == [TrialState.RUNNING]
    assert not any(held.is_awaited for held in other._ledger.running)


def test_gpu_hours_stop_probes_side_by_side(shared, jobs):
    # two probes of one GPU, three seconds old each, in a budget of five seconds
    shared.plan = replace(
        shared.plan, space=replace(shared.plan.space, budget=Budget(max_gpu_hours=1000 / 3600))
    )
    search = shared.search(slots=2)
    search._resume()
    in_flight(search)
    finish(jobs)
    while len(search._flights) < 2:
        search._advance()
    search._chooser._plan = replace(
        shared.plan, space=replace(shared.plan.space, budget=Budget(max_gpu_hours=5 / 3600))
    )
    search._advance()
    assert len(jobs.cancelled) == 2
    assert any("GPU-hours are used up" in note for note in search._view.notes)


def test_infrastructure_failures_end_a_search_and_what_else_it_runs(shared, jobs):
    search = shared.search(slots=1)
    bad = ProbeOutcome(ProbeStatus.INFRASTRUCTURE, "node7 is down", 1.0)
    real = search._advance

    def advance():
        # the third failure comes with another probe in flight
        jobs_of_this_turn = list(jobs.jobs)
        busy = real()
        for name in jobs_of_this_turn[:3]:
            jobs.ended.setdefault(name, bad)
        if len(jobs_of_this_turn) == 2:
            search._runner.slots = 2
        return busy

    search._advance = advance
    with pytest.raises(ProbesFailedError, match="3 probes in a row could not run: node7 is down"):
        search.run()
    statuses = Counter(str(r.outcome.status) for r in shared.records())
    assert statuses["infrastructure"] == 3 and statuses.total() == len(jobs.jobs)
    assert all(t.state.is_finished() for t in shared.study().get_trials())


def test_a_claim_that_could_not_be_withdrawn_is_withdrawn_later(shared, monkeypatch):
    one, two = shared.search(seed=5), shared.search(seed=5)
    one._resume(), two._resume()
    failed = []
    real_admits, real_set = one._chooser.admits, Ledger._set

    def fails_once(self, number, name, value):
        if self is one._ledger and name == Attr.WITHDRAWN and not failed:
            failed.append(number)
            raise StorageError("down")
        return real_set(self, number, name, value)

    monkeypatch.setattr(outage, "FIRST_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(Ledger, "_set", fails_once)
    one._chooser.admits = lambda held: bool(failed) and real_admits(held)
    turn_by_turn(one, two)
    (number,) = failed
    trial = shared.study().get_trials()[number]
    assert trial.state is TrialState.FAIL and Attr.WITHDRAWN in trial.user_attrs
    assert Counter(r.config_id for r in shared.records()) == Counter(list(shared.plan.by_id))


def test_what_a_study_stores_holds_no_outcome_twice_on_disk(shared):
    search = shared.search()
    search._resume()
    number = in_flight(search)
    directory = search._flights[0].directory
    time.sleep(0.01)
    while search._flights and search._flights[0].number == number:
        search._advance()
    assert read_outcome(directory) == next(r for r in shared.records() if r.number == number).outcome


def test_what_an_older_version_left_in_its_queue_is_dropped_and_can_be_probed(shared):
    first = shared.search()
    item = shared.plan.pool[0].candidate
    first._ledger._study.enqueue_trial(dict(item.choices), user_attrs={Attr.CONFIG_ID: item.config_id})
    turn_by_turn(first)
    (queued, *_) = shared.study().get_trials()
    assert queued.state is TrialState.FAIL
    assert Counter(r.config_id for r in shared.records()) == Counter(list(shared.plan.by_id))


def test_a_running_trial_of_an_older_version_is_given_up_or_told(shared):
    folder = shared.root / "disk" / "trials"
    search = shared.search()
    study, pool = search._ledger._study, shared.plan.pool
    for name, item in (("with", pool[0].candidate), ("without", pool[1].candidate)):
        (folder / name).mkdir(parents=True)
        study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=dict(item.choices),
                distributions=search._ledger._distributions,
                user_attrs={
                    Attr.CONFIG_ID: item.config_id, Attr.ROLE: Role.PROBE, Attr.DIRECTORY: f"trials/{name}"
                },
            )
        )  # fmt: skip
    spec = replace(search._spec({}, pool[0].candidate.config_id, folder / "with"))
    write_outcome(folder / "with", scripted.outcome_of(spec))
    search._resume()
    statuses = [r.outcome.status for r in shared.records()]
    assert statuses == [ProbeStatus.COMPLETED, ProbeStatus.CANCELLED]
