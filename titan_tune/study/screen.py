"""A first search on dry runs, whose results are the predictions of the search that follows.

A dry run takes one GPU where a probe of the job takes all of them, so it is cheap to ask it about the most promising
candidates first. Two searches, one after the other: the first one is an ordinary study of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from titan_tune.domain.probe import ProbeStatus
from titan_tune.space.axes import Budget
from titan_tune.study.plan import Plan
from titan_tune.study.records import TrialRecord, completed

SCREENED = 16
"""Dry runs at most: after about that many a probe of the real job tells more."""
SUFFIX = ".dry-run"


def screen_name(study: str) -> str:
    """Name of the study of dry runs that goes before ``study``."""
    return f"{study}{SUFFIX}"


def screen_plan(plan: Plan) -> Plan:
    """The plan of the first search: the same candidates, no finals, and a budget of dry runs."""
    space = plan.space
    budget = Budget(max_probes=SCREENED, max_wall_clock_hours=space.budget.max_wall_clock_hours)
    probe = space.probe.model_copy(update={"finalists": 0, "screen": "none"})
    return replace(plan, space=replace(space, budget=budget, probe=probe))


def screened(plan: Plan, records: Sequence[TrialRecord]) -> Plan:
    """The plan of the second search: what the dry runs found in place of what was predicted.

    A candidate that failed in its dry run for a reason of its own is left out, but not the baseline: the user's job.
    """
    found = {r.config_id: r.tokens_per_second for r in completed(records) if r.tokens_per_second}
    base = plan.baseline.candidate.config_id if plan.baseline else None
    failed = {
        r.config_id: f"{r.outcome.status}: {r.outcome.message}"
        for r in records
        if r.outcome.status is not ProbeStatus.COMPLETED and r.outcome.status.is_about_the_configuration
    }
    rejected = {config: why for config, why in failed.items() if config not in found and config != base}
    return plan.with_predictions(found, rejected=rejected)
