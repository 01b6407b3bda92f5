"""A search whose probes are scripted, run as a process of its own: ``scripted_search.py OPTIONS``, see ``main``.

The search, its storage and its files are real. Only the choice of the next candidate is made cheap (any that is open),
and a probe is a sleep.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import optuna
from optuna.trial import TrialState

from titan_tune.domain.probe import (
    Measurement,
    ProbeOutcome,
    ProbeProgress,
    ProbeSpec,
    ProbeStatus,
    RankMemory,
)
from titan_tune.errors import TitanTuneError
from titan_tune.probe.record import write_outcome
from titan_tune.space.file import load_space
from titan_tune.study import outage, storage
from titan_tune.study.choose import make_sampler
from titan_tune.study.info import join, new_info
from titan_tune.study.plan import Plan, make_plan
from titan_tune.study.propose import Proposal
from titan_tune.study.records import Attr
from titan_tune.study.sampler import FeasibleSampler
from titan_tune.study.search import Pace, Search

STUDY = "shared"
STARTED = "started.txt"
"""In the study's folder: a line for every probe that any search starts."""
SPACE = """
[base.model]
name = "llama3"
flavor = "debugmodel"
[base.training]
seq_len = 64
local_batch_size = 1
[cluster]
gpu = "cpu"
gpus_per_node = 1
[axes]
"training.max_norm" = {norms}
"optimizer.lr" = {rates}
[probe]
steps = 5
warmup_steps = 2
finalists = {finalists}
"""


def scripted_plan(candidates: int, folder: Path, *, finalists: int = 0) -> Plan:
    """A plan of so many candidates (a multiple of ten)."""
    path = folder / f"space-{candidates}-{finalists}.toml"
    norms = [0.1 * (i + 1) for i in range(10)]
    rates = [1e-4 + 1e-6 * i for i in range(candidates // 10)]
    if not path.exists():
        path.write_text(SPACE.format(norms=norms, rates=rates, finalists=finalists))
    return make_plan(load_space(path))


def speed(config_id: str) -> float:
    """Tokens/s per GPU that a configuration always measures."""
    return 1000.0 + int(config_id[:6], 16) % 1000


def outcome_of(spec: ProbeSpec) -> ProbeOutcome:
    tps = speed(spec.config_id)
    memory = (RankMemory(0, 1, 1, 1),)
    measurement = Measurement(
        tps, (0.99 * tps, 1.01 * tps), 1.0, 3, 2, False, 1.0, (2.0, 1.9), memory, 0, "rss"
    )
    return ProbeOutcome(ProbeStatus.COMPLETED, "", 1.0, measurement)


class OpenSampler(FeasibleSampler):
    """Any candidate that is not in the study, in an order of this process's own."""

    seed = 0

    def proposal(self, study: optuna.Study) -> Proposal | None:
        taken = {
            trial.user_attrs.get(Attr.CONFIG_ID)
            for trial in study.get_trials(deepcopy=False)
            if trial.state in (TrialState.RUNNING, TrialState.COMPLETE)
        }
        free = [i for i, item in enumerate(self._pool.items) if item.config_id not in taken]
        if not free:
            return None
        index = random.Random(self.seed * 10_007 + len(taken)).choice(free)
        return Proposal(index, 1.0, (1.0, 1.0), 1.0, success=1.0, seconds=1.0)


class SleepingHandle:
    def __init__(self, spec: ProbeSpec, seconds: float):
        self.spec, self.end = spec, time.monotonic() + seconds

    def poll(self):
        if time.monotonic() < self.end:
            return None
        outcome = outcome_of(self.spec)
        write_outcome(self.spec.directory, outcome)
        return outcome

    def progress(self):
        return ProbeProgress("step", 0, self.spec.settings.steps, None, 0.0)

    def cancel(self):
        return ProbeOutcome(ProbeStatus.CANCELLED, "cancelled", 0.0)


class SleepingRunner:
    """Notes every start in one file, in one write, and sleeps."""

    name = "scripted"

    def __init__(self, journal: Path, *, slots: int, seconds: float):
        self.slots, self.seconds, self.journal = slots, seconds, journal

    def start(self, spec: ProbeSpec) -> SleepingHandle:
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(f"{spec.config_id} {spec.directory.name}\n")
        return SleepingHandle(spec, self.seconds)

    def close(self) -> None:
        """Sleeping needs no end."""


class Lines:
    """Notes and results on stdout."""

    def update(self, snapshot) -> None:
        return None

    def finished(self, record, label) -> None:
        print(f"told {record.number} {record.config_id}", flush=True)

    def note(self, text) -> None:
        print(f"note {text}", flush=True)


def scripted_search(
    plan: Plan, folder: Path, url: str, *, seed: int = 0, slots: int = 1, seconds: float = 0.0,
    patience: float = 120.0, lease: float = 60.0, view=None,
) -> Search:  # fmt: skip
    sampler = make_sampler(plan)
    sampler.__class__, sampler.seed = OpenSampler, seed
    study = storage.create_or_load(STUDY, url, sampler=sampler)
    with storage.storage_errors(url):
        join(study, new_info(plan, device="cpu", environment={}))
    runner = SleepingRunner(folder / STARTED, slots=slots, seconds=seconds)
    return Search(
        plan, study, sampler, runner, folder, view or Lines(), url=url, device="cpu",
        pace=Pace(poll=0.002, watch=0.1, renew=1.0, lease=lease, patience=patience),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    given = parser.parse_args()
    outage.LONGEST_DELAY_SECONDS = 0.5
    given.folder.mkdir(parents=True, exist_ok=True)
    plan = scripted_plan(given.candidates, given.folder.parent)
    url = storage.storage_url(given.folder, given.url)
    try:
        search = scripted_search(
            plan, given.folder, url, seed=given.seed, slots=given.slots, seconds=given.seconds
        )
        print(f"ended {search.run()}", flush=True)
    except TitanTuneError as error:
        print(f"failed {type(error).__name__}: {error}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
