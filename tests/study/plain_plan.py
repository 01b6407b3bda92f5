"""Planning done the plain way: combination by combination, everything from scratch. The reference for the grid."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

from titan_tune.domain.candidate import Candidate, Finding
from titan_tune.domain.estimate import Verdict
from titan_tune.estimate import NotCoveredError, estimate_memory, estimate_step_time
from titan_tune.space.axes import Space
from titan_tune.study.plan import MEMORY_RULE, Outlook, memory_finding
from titan_tune.titan.canonical import canonical, identity
from titan_tune.titan.keys import defaults
from titan_tune.titan.rules import first_invalid
from titan_tune.titan.settings import settings_from

GLOBAL_BATCH = "training.global_batch_size"


@dataclass
class PlainPlan:
    pool: list[tuple[Candidate, Outlook]] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Finding] = field(default_factory=dict)
    feasible: list[Candidate] = field(default_factory=list)
    duplicates: int = 0
    total: int = 0

    def reject(self, finding: Finding) -> None:
        self.rejected[finding.rule] += 1
        self.examples.setdefault(finding.rule, finding)


def plain_plan(space: Space) -> PlainPlan:
    plan = PlainPlan()
    _enumerate(space, plan)
    for candidate in plan.feasible:
        try:
            memory = estimate_memory(candidate.settings)
            speed = estimate_step_time(candidate.settings)
        except NotCoveredError:
            plan.pool.append((candidate, Outlook(None, None)))
            continue
        if memory.verdict is Verdict.DOES_NOT_FIT:
            plan.reject(memory_finding(memory))
        else:
            plan.pool.append((candidate, Outlook(memory.verdict, speed.tokens_per_second_per_gpu)))
    plan.pool.sort(
        key=lambda pair: (
            -1.0 if pair[1].verdict is None else -pair[1].tokens_per_second_per_gpu,
            pair[0].config_id,
        )
    )
    assert MEMORY_RULE not in plan.rejected or plan.examples[MEMORY_RULE].rule == MEMORY_RULE
    return plan


def _enumerate(space: Space, plan: PlainPlan) -> None:
    raw, default, seen = space.base.resolved(), defaults(), set()
    for combination in product(*(axis.values for axis in space.axes)):
        plan.total += 1
        values = {**raw, GLOBAL_BATCH: space.global_batch_size}
        for choice in combination:
            values |= {key: default[key] if v is None else v for key, v in choice.values.items()}
        settings = settings_from(values, space.base.model, space.cluster)
        finding = first_invalid(settings, values)
        if finding is not None:
            plan.reject(finding)
            continue
        own = identity(values, settings, space.base.model)
        if own in seen:
            plan.duplicates += 1
            continue
        seen.add(own)
        form = canonical(values, settings)
        written = [key for choice in combination for key in choice.values] + [GLOBAL_BATCH]
        plan.feasible.append(
            Candidate(
                {axis.name: choice.label for axis, choice in zip(space.axes, combination, strict=True)},
                {key: form[key] for key in written if form[key] != raw[key]},
                settings,
                own,
            )
        )
