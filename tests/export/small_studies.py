"""Real studies in real storages, with two invented trials: the job as it was, and a faster one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import Measurement, ProbeOutcome, ProbeStatus, RankMemory
from titan_tune.machine import cpu_spec
from titan_tune.probe.record import outcome_to_dict
from titan_tune.study import storage as store
from titan_tune.study.info import StudyInfo
from titan_tune.study.records import Attr, Role
from titan_tune.units import GIB

JOB = """# the user's own comment
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
"""
CHOICES = ("selective-2", "full")


def measurement(tokens_per_second: float, **changes: Any) -> Measurement:
    found = Measurement(
        tokens_per_second_per_gpu=tokens_per_second,
        interval=(0.99 * tokens_per_second, 1.01 * tokens_per_second),
        step_seconds=8192 / tokens_per_second,
        measured_steps=10,
        warmup_steps=3,
        stopped_early=False,
        time_to_first_step=30.0,
        losses=tuple(12.0 - 0.1 * step for step in range(13)),
        memory=(RankMemory(0, 40 * GIB, 44 * GIB, 46 * GIB),),
        alloc_retries=0,
    )
    return replace(found, **changes)


def info(*, cpu: bool = False, nodes: int = 1, per_node: int = 8, **changes: Any) -> StudyInfo:
    gpu = cpu_spec(2) if cpu else gpu_spec("h100-80gb")
    fields: dict[str, Any] = {
        "titan_tune": "0.1.0",
        "created": "2026-11-30T00:00:00+00:00",
        "job_name": "job.toml",
        "job_text": JOB,
        "cluster": ClusterSpec(gpu=gpu, num_nodes=nodes, gpus_per_node=per_node),
        "device": "cpu" if cpu else "cuda",
        "global_batch_size": 64,
        "axes": {"activation_checkpoint": list(CHOICES)},
        "numerics_axes": [],
        "probe": {},
        "total": 2,
        "candidates": 2,
        "rejected": {},
        "environment": {"packages": {"torch": "2.11.0"}, "gpu": gpu.name},
        "fingerprint": {},
    }
    return StudyInfo.model_validate(fields | changes)


def make_study(
    runs: Path,
    name: str,
    *,
    study_info: StudyInfo | None = None,
    best: Measurement | None = None,
    details: dict[str, Any] | None = None,
    url: str | None = None,
) -> None:
    """A study with a measured baseline (trial 0) and a measured winner (trial 1)."""
    directory = store.study_directory(runs, name)
    store.private_directory(directory)
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = store.create_or_load(name, store.storage_url(directory, url), sampler=sampler)
    study.set_user_attr(Attr.STUDY, (study_info or info()).model_dump(mode="json"))
    rows = (
        (Role.BASELINE, CHOICES[0], measurement(6000.0), {}, {}),
        (
            Role.PROBE,
            CHOICES[1],
            best or measurement(7000.0),
            {"activation_checkpoint.mode": "full"},
            details or {},
        ),
    )
    for role, choice, measured, values, said in rows:
        outcome = ProbeOutcome(ProbeStatus.COMPLETED, "", 60.0, measured, said)
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE,
                value=measured.tokens_per_second_per_gpu,
                params={"activation_checkpoint": choice},
                distributions={"activation_checkpoint": CategoricalDistribution(CHOICES)},
                user_attrs={
                    Attr.CONFIG_ID: f"{choice}-id",
                    Attr.ROLE: role,
                    Attr.DIRECTORY: f"trials/{choice}",
                    Attr.OUTCOME: outcome_to_dict(outcome),
                    Attr.VALUES: values,
                    Attr.PREDICTED: {"tokens_per_second_per_gpu": 6500.0, "active_gib": 41.0},
                },
            )
        )
