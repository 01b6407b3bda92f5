"""From a space to what may reach a GPU: valid, distinct, fitting candidates with their predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_tune.domain.candidate import Candidate, Finding
from titan_tune.domain.estimate import MemoryEstimate, StepTimeEstimate, Verdict
from titan_tune.errors import NothingFeasibleError
from titan_tune.estimate import NotCoveredError, estimate_memory, estimate_step_time
from titan_tune.space.axes import Space
from titan_tune.space.enumerate import candidates
from titan_tune.units import format_gib

MEMORY_RULE = "does-not-fit"


@dataclass(frozen=True)
class Ranked:
    """A candidate with what the formula says of it (``None`` where no formula covers the model)."""

    candidate: Candidate
    memory: MemoryEstimate | None
    step_time: StepTimeEstimate | None

    @property
    def predicted_tokens_per_second(self) -> float:
        """Per GPU; 1.0 for every candidate where nothing is predicted, so that only probes tell them apart."""
        return self.step_time.tokens_per_second_per_gpu if self.step_time else 1.0

    @property
    def label(self) -> str:
        """The choices in one line."""
        return label_of(self.candidate)


@dataclass(frozen=True)
class Plan:
    """What a search may run. ``pool`` is ordered by predicted throughput, best first."""

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


def label_of(candidate: Candidate) -> str:
    """``axis=label`` pairs in one line, or ``base`` for a space without axes."""
    return ", ".join(f"{axis}={label}" for axis, label in candidate.choices.items()) or "base"


def rank(candidate: Candidate) -> Ranked:
    """Predict memory and speed of one candidate."""
    try:
        return Ranked(candidate, estimate_memory(candidate.settings), estimate_step_time(candidate.settings))
    except NotCoveredError:
        return Ranked(candidate, None, None)


def memory_finding(memory: MemoryEstimate) -> Finding | None:
    """Why a candidate does not fit, if so."""
    if memory.verdict is not Verdict.DOES_NOT_FIT:
        return None
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
    rejected, examples = Counter(enumeration.rejected), dict(enumeration.examples)
    pool: list[Ranked] = []
    for candidate in enumeration.feasible:
        ranked = rank(candidate)
        finding = memory_finding(ranked.memory) if ranked.memory else None
        if finding:
            rejected[finding.rule] += 1
            examples.setdefault(finding.rule, finding)
        else:
            pool.append(ranked)
    pool.sort(key=lambda r: (-r.predicted_tokens_per_second, r.candidate.config_id))
    baseline, problem = _baseline(enumeration.baseline, space)
    if not pool and baseline is None:
        raise NothingFeasibleError(explain_nothing(rejected, examples, total=enumeration.total))
    notes: tuple[str, ...] = ()
    if any(r.memory is None for r in pool):
        notes = (
            f"no formula covers {space.base.model.name} {space.base.model.flavor}: nothing is pruned by memory",
        )
    return Plan(
        space=space,
        pool=tuple(pool),
        baseline=baseline,
        baseline_problem=problem,
        rejected=rejected,
        examples=examples,
        total=enumeration.total,
        duplicates=enumeration.duplicates,
        notes=notes,
        by_id={r.candidate.config_id: r for r in [*([baseline] if baseline else []), *pool]},
    )


def _baseline(candidate: Candidate, space: Space) -> tuple[Ranked | None, Finding | None]:
    from titan_tune.titan.rules import first_invalid

    finding = first_invalid(candidate.settings, {**space.base.resolved(), **candidate.values})
    if finding:
        return None, finding
    ranked = rank(candidate)
    finding = memory_finding(ranked.memory) if ranked.memory else None
    return (None, finding) if finding else (ranked, None)


def explain_nothing(rejected: Counter[str], examples: dict[str, Finding], *, total: int) -> str:
    """One line: how many candidates, and the reasons that rejected most of them."""
    reasons = "; ".join(
        f"{rule} rejects {count} ({examples[rule].message})" for rule, count in rejected.most_common(3)
    )
    return f"nothing feasible among {total} candidates: {reasons or 'the space is empty'}"


def predicted_best(pool: Sequence[Ranked]) -> Ranked:
    """The candidate the model likes best."""
    return max(pool, key=lambda r: r.predicted_tokens_per_second)
