"""What a configuration does to the mathematics of the training besides the keys that say so. Pure.

Some layouts train otherwise than others (``titan/rules``): torchtitan 0.2.2 runs tensor and pipeline parallelism alone
in fp32, divides DDP's gradients twice and back-propagates a pipeline's loss summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_tune.domain.candidate import Value
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError
from titan_tune.study.records import Role, TrialRecord
from titan_tune.study.selection import winner
from titan_tune.titan.job import Job
from titan_tune.titan.rules import NUMERICS_RULES
from titan_tune.titan.settings import resolve


def layout_effects(
    base: Job, cluster: ClusterSpec, values: Mapping[str, Value], start: Mapping[str, Value]
) -> tuple[str, ...]:
    """What distinguishes the mathematics of a configuration from that of the job as it was, one line each.

    ``values`` and ``start`` are the dotted keys that the configuration and the job as it was set in ``base``.
    """
    after, before = _effects(base, cluster, values), _effects(base, cluster, start)
    return (
        *[message for rule, message in after.items() if rule not in before],
        *[f"no longer so: {message}" for rule, message in before.items() if rule not in after],
    )


def winner_effects(base: Job, cluster: ClusterSpec, records: Sequence[TrialRecord]) -> tuple[str, ...]:
    """The same for the best configuration of a study; nothing while there is none."""
    best = winner(records)
    if best is None:
        return ()
    return layout_effects(base, cluster, best.standing.latest.values, start_values(records))


def start_values(records: Sequence[TrialRecord]) -> Mapping[str, Value]:
    """Keys that the job as it was sets in the base job; none where it did not run."""
    return next((record.values for record in records if record.role is Role.BASELINE), {})


def _effects(base: Job, cluster: ClusterSpec, values: Mapping[str, Value]) -> dict[str, str]:
    """Rule to what it says."""
    try:
        job = base.with_values(values)
        settings = resolve(job, cluster)
    except InputError:  # the study is of a version that knew other keys
        return {}
    resolved = job.resolved()
    findings = [rule(settings, resolved) for rule in NUMERICS_RULES]
    return {finding.rule: finding.message for finding in findings if finding is not None}
