"""From a space to what may reach a GPU: valid, distinct, fitting candidates with their predictions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from titan_tune.domain.candidate import Candidate, Finding
from titan_tune.domain.estimate import MemoryEstimate, StepTimeEstimate, Verdict
from titan_tune.domain.settings import Settings
from titan_tune.errors import NothingFeasibleError
from titan_tune.estimate import NotCoveredError, estimate_memory, estimate_step_time
from titan_tune.space.axes import Space
from titan_tune.space.enumerate import Feasible, candidates
from titan_tune.titan.rules import first_invalid
from titan_tune.units import format_gib

MEMORY_RULE = "does-not-fit"
SCREEN_RULE = "fails-in-a-dry-run"
SHORT = {
    "activation_checkpoint": "AC ",
    "compile": "compile ",
    "float8": "float8 ",
    "local_batch_size": "batch ",
    "parallelism": "",
}
"""How the named axes are called where a line has to be short; other axes go by the last part of their key."""
MAX_POOL = 20_000
"""Candidates that a search keeps (docs/decisions/0004-large-spaces.md)."""


class Outlook(NamedTuple):
    """What the formula says of a candidate, in short; both ``None`` where it does not cover the model."""

    verdict: Verdict | None
    tokens_per_second_per_gpu: float | None


@dataclass(frozen=True)
class Ranked:
    """A candidate with its outlook; the estimates in full are made when asked for."""

    candidate: Candidate
    outlook: Outlook

    @property
    def predicted_tokens_per_second(self) -> float:
        """Per GPU; 1.0 for every candidate where nothing is predicted, so that only probes tell them apart."""
        return predicted_speed(self.outlook)

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits, where a formula covers the model."""
        return self.outlook.verdict

    @cached_property
    def memory(self) -> MemoryEstimate | None:
        """The memory estimate (``None`` where no formula covers the model)."""
        return estimate_memory(self.candidate.settings) if self.outlook.verdict else None

    @cached_property
    def step_time(self) -> StepTimeEstimate | None:
        """The step-time estimate (``None`` where no formula covers the model)."""
        return estimate_step_time(self.candidate.settings) if self.outlook.verdict else None

    @property
    def label(self) -> str:
        """The choices in one line."""
        return label_of(self.candidate.choices)


@dataclass(frozen=True)
class Plan:
    """What a search may run. ``pool`` is ordered by predicted throughput, best first; of more than ``MAX_POOL``
    candidates that fit it holds the best, and ``notes`` say so."""

    space: Space
    pool: tuple[Ranked, ...]
    baseline: Ranked | None
    """The user's own job, or ``None`` when it is invalid or does not fit (``baseline_problem`` says why)."""
    baseline_problem: Finding | None
    rejected: Counter[str]
    examples: dict[str, Finding]
    total: int
    duplicates: int
    notes: tuple[str, ...] = ()
    by_id: dict[str, Ranked] = field(default_factory=dict, repr=False)

    def with_predictions(self, found: Mapping[str, float], *, rejected: Mapping[str, str]) -> Plan:
        """The plan with better predictions for some of its candidates, and without those that are known not to run.

        ``found`` is config id to tokens/s per GPU, ``rejected`` config id to the reason. The other predictions are
        scaled by the median of what was found over what was predicted, so that all of them stay comparable. The
        baseline keeps its place: it is measured whatever is predicted.
        """
        known = [item for item in self.by_id.values() if item.candidate.config_id in found]
        ratios = [found[i.candidate.config_id] / i.predicted_tokens_per_second for i in known]
        scale = statistics.median(ratios) if ratios else 1.0

        def better(item: Ranked) -> Ranked:
            speed = found.get(item.candidate.config_id, scale * item.predicted_tokens_per_second)
            return replace(item, outlook=Outlook(item.outlook.verdict, speed))

        kept = [better(item) for item in self.pool if item.candidate.config_id not in rejected]
        pool = tuple(sorted(kept, key=lambda r: (-r.predicted_tokens_per_second, r.candidate.config_id)))
        baseline = better(self.baseline) if self.baseline else None
        counts, examples = Counter(self.rejected), dict(self.examples)
        if len(pool) < len(self.pool):
            counts[SCREEN_RULE] += len(self.pool) - len(pool)
            reason = next(
                rejected[i.candidate.config_id] for i in self.pool if i.candidate.config_id in rejected
            )
            examples[SCREEN_RULE] = Finding(SCREEN_RULE, reason, "")
        return replace(
            self,
            pool=pool,
            baseline=baseline,
            rejected=counts,
            examples=examples,
            by_id={r.candidate.config_id: r for r in [*([baseline] if baseline else []), *pool]},
        )

    def labels(self) -> dict[str, tuple[str, ...]]:
        """Axis name to every label that a trial of this plan can carry, in axis order."""
        items = [*self.pool, *([self.baseline] if self.baseline else [])]
        names = [axis.name for axis in self.space.axes]
        found = {
            name: [value.label for value in axis.values]
            for name, axis in zip(names, self.space.axes, strict=True)
        }
        for item in items:
            for name, label in item.candidate.choices.items():
                labels = found.setdefault(name, [])
                if label not in labels:
                    labels.append(label)
        return {name: tuple(labels) for name, labels in found.items()}


def label_of(choices: Mapping[str, str]) -> str:
    """The choices in one short line, e.g. ``AC none, compile default, dp_shard=2, batch 8``."""
    return (
        ", ".join(SHORT.get(axis, f"{axis.rpartition('.')[2]}=") + label for axis, label in choices.items())
        or "base"
    )


def outlook(settings: Settings) -> Outlook:
    """Whether a configuration fits and how fast it is."""
    try:
        memory, speed = estimate_memory(settings), estimate_step_time(settings)
    except NotCoveredError:
        return Outlook(None, None)
    return Outlook(memory.verdict, speed.tokens_per_second_per_gpu)


def predicted_speed(outlook: Outlook) -> float:
    """Tokens/s per GPU to order by; the same for all that are not covered."""
    return 1.0 if outlook.tokens_per_second_per_gpu is None else outlook.tokens_per_second_per_gpu


def memory_finding(memory: MemoryEstimate) -> Finding:
    """Why a candidate does not fit."""
    return Finding(
        MEMORY_RULE,
        f"needs {format_gib(memory.active_bytes + memory.outside_bytes)} of {format_gib(memory.capacity_bytes)}"
        f" (peak in {memory.peak.name})",
        "more activation checkpointing, a smaller local batch, or more shards",
    )


def make_plan(space: Space) -> Plan:
    """Enumerate, check, estimate and order a space.

    Raises:
        NothingFeasibleError: nothing is left; the message says which reasons bind.
    """
    enumeration = candidates(space)
    feasible = enumeration.feasible
    outlooks, number = feasible.evaluate(outlook)
    fits = np.array([o.verdict is not Verdict.DOES_NOT_FIT for o in outlooks], dtype=bool)[number]
    rejected, examples = Counter(enumeration.rejected), dict(enumeration.examples)
    if not fits.all():
        example = estimate_memory(feasible[int(np.argmin(fits))].settings)
        rejected[MEMORY_RULE] = int((~fits).sum())
        examples[MEMORY_RULE] = memory_finding(example)
    speeds = np.array([predicted_speed(o) for o in outlooks])[number]
    fitting = np.flatnonzero(fits)
    kept = fastest(feasible, fitting, speeds[fitting], MAX_POOL)
    pool = tuple(Ranked(feasible[place], outlooks[number[place]]) for place in kept)
    baseline, problem = _baseline(enumeration.baseline, space)
    if not pool and baseline is None:
        raise NothingFeasibleError(explain_nothing(rejected, examples, total=enumeration.total))
    return Plan(
        space=space,
        pool=pool,
        baseline=baseline,
        baseline_problem=problem,
        rejected=rejected,
        examples=examples,
        total=enumeration.total,
        duplicates=enumeration.duplicates,
        notes=tuple(_notes(space, pool, fitting=len(fitting))),
        by_id={r.candidate.config_id: r for r in [*([baseline] if baseline else []), *pool]},
    )


def fastest(
    feasible: Feasible, places: npt.NDArray[np.int64], speeds: npt.NDArray[np.float64], limit: int
) -> list[int]:
    """The ``limit`` of ``places`` with the highest ``speeds``, fastest first, equal ones by config id."""
    if len(places) > limit:  # config ids are dear: only of those that may be among the best
        slowest = np.partition(speeds, len(speeds) - limit)[len(speeds) - limit]
        places, speeds = places[speeds >= slowest], speeds[speeds >= slowest]
    pairs = zip(places.tolist(), speeds.tolist(), strict=True)
    order = sorted((-speed, feasible.config_id(place), place) for place, speed in pairs)
    return [place for _, _, place in order[:limit]]


def _notes(space: Space, pool: Sequence[Ranked], *, fitting: int) -> Iterator[str]:
    model = space.base.model
    if any(ranked.verdict is None for ranked in pool):
        yield f"no formula covers {model.name} {model.flavor}: nothing is pruned by memory"
    if fitting > len(pool):
        share = pool[-1].predicted_tokens_per_second / pool[0].predicted_tokens_per_second
        yield (
            f"{fitting:,} candidates fit; the search chooses among the {len(pool):,} predicted fastest "
            f"(down to {share:.0%} of the best prediction)"
        )


def _baseline(candidate: Candidate, space: Space) -> tuple[Ranked | None, Finding | None]:
    finding = first_invalid(candidate.settings, {**space.base.resolved(), **candidate.values})
    if finding:
        return None, finding
    ranked = Ranked(candidate, outlook(candidate.settings))
    if ranked.memory is not None and ranked.verdict is Verdict.DOES_NOT_FIT:
        return None, memory_finding(ranked.memory)
    return ranked, None


def explain_nothing(rejected: Counter[str], examples: dict[str, Finding], *, total: int) -> str:
    """One line: how many candidates, and the reasons that rejected most of them."""
    reasons = "; ".join(
        f"{rule} rejects {count} ({examples[rule].message})" for rule, count in rejected.most_common(3)
    )
    return f"nothing feasible among {total} candidates: {reasons or 'the space is empty'}"
