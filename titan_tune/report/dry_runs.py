"""The dry runs of a study: what ran, what they take for granted, and how a report says so. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from titan_tune.domain.probe import Origin
from titan_tune.study.info import StudyInfo
from titan_tune.study.records import TrialRecord

EXPERT_DEGREE: Final = "parallelism.expert_parallel_degree"


@dataclass(frozen=True, slots=True)
class DryRuns:
    """What the dry runs of a study have in common."""

    gpu: str
    """What the ranks ran on."""
    is_target: bool
    """Whether the job is for that GPU."""
    most_ranks: int
    """Ranks that ran, in the dry run with the most; 0 where none recorded it."""
    world_size: int
    intervals: tuple[float, float] | None
    """Smallest and largest half width of the stated intervals, relative."""
    has_pipeline: bool
    has_experts: bool
    warmup_steps: int | None


def dry_runs(info: StudyInfo, records: Sequence[TrialRecord]) -> DryRuns | None:
    """The dry runs among the records; ``None`` where there are none."""
    dry = [r for r in records if r.outcome.origin is Origin.DRY_RUN]
    if not dry:
        return None
    details: list[dict[str, Any]] = [r.outcome.details.get("dry_run") or {} for r in dry]
    ranks = [found.get("ranks", []) for found in details]
    widths = [found["relative_interval"] for found in details if "relative_interval" in found]
    target, here = info.cluster.gpu.name, str(info.environment.get("gpu") or "")
    simulated = {str(found["gpu"]) for found in details if "gpu" in found} or {target}
    is_target = simulated == {target}
    base = info.base()
    return DryRuns(
        gpu=here if here and is_target else ", ".join(sorted(simulated)),
        is_target=is_target,
        most_ranks=max(map(len, ranks)),
        world_size=info.cluster.world_size,
        intervals=(min(widths), max(widths)) if widths else None,
        has_pipeline=any(rank.get("pipeline_rank") for found in ranks for rank in found),
        has_experts=any(int(r.values.get(EXPERT_DEGREE, base.get(EXPERT_DEGREE)) or 1) > 1 for r in dry),
        warmup_steps=max((r.measurement.warmup_steps for r in dry if r.measurement), default=None),
    )


def what_it_is(found: DryRuns) -> str:
    """What a dry run is and what it takes for granted, in a few sentences."""
    several = found.most_ranks > 1
    ranks, alone = (f"up to {found.most_ranks} ranks", "each alone") if several else ("one rank", "alone")
    which, they = ("ranks", "they") if several else ("rank", "it")
    said = [
        f"A dry run runs {ranks} of the job's {found.world_size}, {alone} on one GPU ({found.gpu}): memory and compute"
        f" are measured on the {which} that ran; communication is computed from the collectives that {they} called and"
        " the job's interconnect, and the pipeline bubble from its schedule."
    ]
    if not found.is_target:
        said.append(
            "Compute on the job's GPU is what was measured here times the formula's ratio of the two."
        )
    if found.has_pipeline:
        said.append("Pipeline ranks that did not run are taken to be as slow as the nearest that did.")
    if found.has_experts:
        said.append("Every expert is taken to get the same number of tokens.")
    return " ".join(said)


def stated_interval(widths: tuple[float, float] | None) -> str:
    """Where intervals of these half widths, relative, are from; goes after *the interval is*."""
    if widths is None:
        return "assumed, not found from repeated runs"
    low, high = (f"{100 * width:.0f} %" for width in widths)
    width = f"± {low}" if low == high else f"± {low} to ± {high}, by layout"
    return f"assumed ({width}), not found from repeated runs"
