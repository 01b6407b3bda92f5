import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from titan_tune.study.lease import LEASE_SECONDS, RENEW_SECONDS, Fate, Lease, Owner, Watch, fate


@pytest.fixture
def me():
    owner = Owner.this_process()
    owner.enter()
    yield owner
    owner.leave()


def test_a_lease_survives_json_and_anything_else_is_none(me):
    lease = Lease(me, "slurm", True, "folder").renewed(12.5)
    assert Lease.from_dict(lease.to_dict()) == lease and lease.beat == 1
    for other in (None, {}, {"owner": 1}, {**lease.to_dict(), "more": 1}, "x", {"owner": {"pid": 1}}):
        assert Lease.from_dict(other) is None


def test_a_search_of_this_process_lives_between_enter_and_leave(me):
    other = Owner.this_process()
    assert fate(other, me) is Fate.GONE
    other.enter()
    assert fate(other, me) is Fate.ALIVE
    other.leave()
    assert fate(other, me) is Fate.GONE


def test_a_search_of_another_process_lives_as_long_as_the_process(me):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = replace(me, token="other", pid=process.pid, started=psutil.Process(process.pid).create_time())
    try:
        assert fate(other, me) is Fate.ALIVE
        assert fate(replace(other, started=other.started - 60), me) is Fate.GONE  # its number was used again
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert fate(other, me) is Fate.GONE  # a zombie
    process.wait()
    assert fate(other, me) is Fate.GONE


def test_a_search_on_another_machine_cannot_be_looked_at(me):
    assert fate(replace(me, machine="elsewhere", token="other"), me) is Fate.ELSEWHERE


class Leases(RuleBasedStateMachine):
    """An owner and an observer on two machines, a storage that comes and goes, and no common clock."""

    @initialize(skew=st.floats(-1e6, 1e6))
    def begin(self, skew):
        self.skew = skew
        self.now = self.next_renewal = 0.0
        self.lease = Lease(Owner("t", "h", "m", 1, 0.0), "local", False, "f")
        self.watch = Watch()
        self.judged_gone = False

    @rule(seconds=st.floats(0.1, 5.0), owner_first=st.booleans())
    def time_passes(self, seconds, owner_first):
        self.now += seconds
        for turn in (self._owner, self._observer) if owner_first else (self._observer, self._owner):
            turn()

    @rule(seconds=st.floats(10.0, 3600.0), owner_first=st.booleans())
    def the_storage_is_away(self, seconds, owner_first):
        self.now += seconds
        self.time_passes(0.1, owner_first)

    @rule(seconds=st.floats(10.0, 3600.0))
    def the_observer_is_stopped(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now += 5.0
            self._owner()

    def _owner(self):
        if self.now >= self.next_renewal:
            self.lease = self.lease.renewed(self.now)
            self.next_renewal = self.now + RENEW_SECONDS

    def _observer(self):
        self.judged_gone = bool(self.watch.expired({7: self.lease}, self.now + self.skew))

    @invariant()
    def who_lives_is_never_judged_gone(self):
        assert not self.judged_gone

    def teardown(self):
        if not hasattr(self, "lease"):
            return
        end = self.now + LEASE_SECONDS + 10.0
        while self.now < end:
            self.now += 2.0
            self._observer()
        assert self.judged_gone  # who is dead is found out in a lease's time


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=60)


def test_a_trial_that_is_over_is_forgotten(me):
    watch, lease = Watch(), Lease(me, "local", False, "f")
    for second in range(0, 60, 10):
        assert not watch.expired({1: lease}, float(second))
    assert watch.expired({1: lease}, 60.0) == {1}
    assert not watch.expired({}, 61.0)
    assert not watch.expired({1: lease}, 62.0)
