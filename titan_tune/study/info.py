"""What a study says of itself: enough to export from it and to notice that a space has changed."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import optuna
from pydantic import Field

import titan_tune
from titan_tune.domain.base import FrozenModel
from titan_tune.domain.candidate import identity_of
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError
from titan_tune.space.axes import Space
from titan_tune.study.plan import Plan
from titan_tune.study.records import Attr
from titan_tune.titan.job import Job, job_from_text, render

SCHEMA = 1


class StudyInfo(FrozenModel):
    """Kept as a user attribute of the study."""

    schema_version: int = SCHEMA
    titan_tune: str
    created: str
    """UTC, ISO 8601."""
    job_name: str
    job_text: str
    """The base job as TOML, ``--set`` values included."""
    cluster: ClusterSpec
    device: str
    global_batch_size: int
    axes: dict[str, list[str]]
    numerics_axes: list[str]
    probe: dict[str, Any]
    total: int
    candidates: int
    rejected: dict[str, int]
    rejection_examples: dict[str, str] = Field(default_factory=dict)
    """Rule to what it said of the first candidate it rejected."""
    slurm: dict[str, Any] = Field(default_factory=dict)
    """The space's ``[slurm]`` table: how jobs are submitted at the site."""
    environment: dict[str, Any]
    fingerprint: dict[str, str]

    def base(self) -> Job:
        """The base job again."""
        return job_from_text(self.job_text, name=self.job_name)


def fingerprint(space: Space, *, device: str) -> dict[str, str]:
    """Hashes of what must not change while a study goes on, by name."""
    parts = {
        "base job": identity_of(space.base.resolved()),
        "model": space.base.model.model_dump_json(),
        "axes": identity_of({a.name: [[v.label, dict(v.values)] for v in a.values] for a in space.axes}),
        "cluster": space.cluster.model_dump_json() if device == "cuda" else str(space.cluster.world_size),
        "global batch size": str(space.global_batch_size),
        "probe data and steps": f"{space.probe.data} {space.probe.steps} {space.probe.warmup_steps}",
    }
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in parts.items()}


def new_info(plan: Plan, *, device: str, environment: dict[str, Any]) -> StudyInfo:
    """The info of a study that starts now."""
    space = plan.space
    return StudyInfo(
        titan_tune=titan_tune.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        job_name=next((path.name for path in (space.base.path, space.path) if path), "job"),
        job_text=render(space.base, space.base.values),
        cluster=space.cluster,
        device=device,
        global_batch_size=space.global_batch_size,
        axes={name: list(labels) for name, labels in plan.labels().items()},
        numerics_axes=list(space.numerics_axes),
        probe=space.probe.model_dump(),
        total=plan.total,
        candidates=len(plan.pool),
        rejected=dict(plan.rejected),
        rejection_examples={rule: finding.message for rule, finding in plan.examples.items()},
        slurm=dict(space.slurm),
        environment=environment,
        fingerprint=fingerprint(space, device=device),
    )


def read_info(study: optuna.Study) -> StudyInfo | None:
    """The study's info; ``None`` before its first search."""
    data = study.user_attrs.get(Attr.STUDY)
    return StudyInfo.model_validate(data) if data else None


def join(study: optuna.Study, info: StudyInfo) -> StudyInfo:
    """Write the info on first use; later check that the space is still the same.

    Raises:
        InputError: the study was made for another space; the message says what changed.
    """
    kept = read_info(study)
    if kept is None:
        study.set_user_attr(Attr.STUDY, info.model_dump(mode="json"))
        kept = read_info(study) or info  # another search may have written its own at the same moment
    changed = [name for name, value in info.fingerprint.items() if kept.fingerprint.get(name) != value]
    if changed:
        raise InputError(
            f"study {study.study_name!r} was made with a different {' and '.join(changed)};"
            " its measurements do not compare: choose another --study"
        )
    return kept
