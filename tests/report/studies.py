"""Studies made of plain objects: no storage, no search. Figures are invented, in plausible proportions."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path
from typing import Any

from titan_tune.domain.cluster import ClusterSpec, GpuSpec
from titan_tune.domain.probe import Measurement, Origin, ProbeOutcome, ProbeSettings, ProbeStatus, RankMemory
from titan_tune.report.data import ReportData, report_data
from titan_tune.study.info import StudyInfo
from titan_tune.study.records import Role, TrialRecord
from titan_tune.units import GIB

H200 = GpuSpec(name="h200", memory_gib=139.8, bf16_tflops=989.0, memory_gb_per_s=4800.0, link_gb_per_s=450.0)
CPU = GpuSpec(
    name="cpu", memory_gib=4.0, bf16_tflops=0.1, memory_gb_per_s=20.0, link_gb_per_s=20.0, is_cpu=True
)
JOB = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
"""
AXES = {
    "activation_checkpoint": ["selective op", "none", "full"],
    "compile": ["off", "default"],
    "float8": ["off", "rowwise"],
    "local_batch_size": ["2", "4"],
}


def info(**changes: object) -> StudyInfo:
    """A study of eight GPUs; any field can be replaced."""
    fields: dict[str, object] = {
        "titan_tune": "0.1.0",
        "created": "2026-11-02T09:30:00+00:00",
        "job_name": "llama3_8b.toml",
        "job_text": JOB,
        "cluster": ClusterSpec(gpu=H200, gpus_per_node=8),
        "device": "cuda",
        "global_batch_size": 64,
        "axes": AXES,
        "numerics_axes": ["float8"],
        "probe": ProbeSettings().model_dump(),
        "total": 96,
        "candidates": 24,
        "rejected": {"does-not-fit": 40, "float8-needs-compile": 24},
        "rejection_examples": {
            "does-not-fit": "needs 187.2 GiB of 139.8 GiB (peak in loss_backward)",
            "float8-needs-compile": "float8 without compile is slower than bfloat16",
        },
        "environment": {
            "python": "3.12.3",
            "packages": {"torch": "2.11.0", "torchtitan": "0.2.2", "torchao": "0.17.0", "triton": None},
            "gpu": "NVIDIA H200",
            "num_gpus": 8,
            "driver": "580.65",
            "cuda": "13.0",
            "hostname": "secret-host",
        },
        "fingerprint": {},
    }
    return StudyInfo.model_validate(fields | changes)


def measurement(tokens_per_second: float, *, active_gib: float = 60.0, **changes: object) -> Measurement:
    """A completed probe's measurement with a 1 % interval."""
    active = int(active_gib * GIB)
    fields: dict[str, object] = {
        "tokens_per_second_per_gpu": tokens_per_second,
        "interval": (0.995 * tokens_per_second, 1.005 * tokens_per_second),
        "step_seconds": 65536.0 / tokens_per_second,
        "measured_steps": 20,
        "warmup_steps": 5,
        "stopped_early": False,
        "time_to_first_step": 41.3,
        "losses": (12.2, 9.9, 8.1234),
        "memory": tuple(
            RankMemory(rank, active, int(1.08 * active), int(1.1 * active) + GIB) for rank in range(8)
        ),
        "alloc_retries": 0,
    }
    return Measurement(**(fields | changes))  # type: ignore[arg-type]


def record(
    number: int,
    choices: dict[str, str],
    tokens_per_second: float | None = None,
    *,
    role: Role = Role.PROBE,
    seconds: float = 90.0,
    status: ProbeStatus = ProbeStatus.OOM,
    message: str = "",
    predicted: float | None = None,
    active_gib: float = 60.0,
    predicted_active_gib: float | None = None,
    values: dict[str, object] | None = None,
    details: dict[str, object] | None = None,
    warnings: tuple[str, ...] = (),
    **measured: object,
) -> TrialRecord:
    """A probe: measured when it has a throughput, else ended with ``status``."""
    config_id = hashlib.sha256("|".join(choices.values()).encode(errors="replace")).hexdigest()[:12]
    found = None
    if tokens_per_second is not None:
        found = measurement(tokens_per_second, active_gib=active_gib, **measured)
        status = ProbeStatus.COMPLETED
    outcome = ProbeOutcome(status, message, seconds, found, details or {}, warnings)
    predictions = {"tokens_per_second_per_gpu": predicted, "active_gib": predicted_active_gib}
    return TrialRecord(
        number=number,
        config_id=config_id,
        role=role,
        choices=choices,
        values=values or {},
        directory=Path("trials") / (config_id if role is not Role.FINALIST else f"{config_id}-2"),
        outcome=outcome,
        predicted={name: value for name, value in predictions.items() if value is not None},
    )


def choices(ac: str, compile_: str, float8: str, batch: str) -> dict[str, str]:
    """Labels of the four axes."""
    return dict(zip(AXES, (ac, compile_, float8, batch), strict=True))


BASE = choices("selective op", "off", "off", "2")
STUCK = choices("full", "default", "rowwise", "4")


def full_study() -> tuple[StudyInfo, list[TrialRecord]]:
    """A baseline, explorers, failures of every usual kind and interleaved finals."""
    speed = {"selective op": 1.0, "none": 1.06, "full": 0.86, "off": 1.0, "default": 1.13, "rowwise": 1.09}
    records = [record(0, BASE, 6420.0, role=Role.BASELINE, predicted=6900.0, active_gib=61.2,
                      predicted_active_gib=60.8)]  # fmt: skip
    for labels in product(*AXES.values()):
        point = choices(*labels)
        number = len(records)
        ac, compile_, float8, batch = labels
        if point in (BASE, STUCK) or (float8 != "off" and compile_ == "off"):
            continue
        values = {"activation_checkpoint.mode": ac.split()[0], "compile.enable": compile_ != "off"}
        if float8 != "off":
            values["model.converters"] = ["quantize.linear.float8"]
        active = {"selective op": 61.0, "none": 88.0, "full": 34.0}[ac] * (0.85 if compile_ != "off" else 1.0)
        active *= 1.7 if batch == "4" else 1.0
        if active > 120.0:
            records.append(record(number, point, message="CUDA out of memory on rank 3 in the backward pass: asked for"
                                  " 7.83 GiB", details={"phase": "step", "rank": 3}, seconds=48.0,
                                  predicted=7000.0, predicted_active_gib=118.0))  # fmt: skip
            continue
        tps = 6420.0 * speed[ac] * speed[compile_] * (speed[float8] if float8 != "off" else 1.0)
        tps *= 1.015 if batch == "4" else 1.0
        wobble = 1.0 + 0.02 * ((number * 7) % 5 - 2)
        records.append(record(number, point, tps, predicted=tps * wobble * 1.07, active_gib=active, values=values,
                              predicted_active_gib=active * (1 + 0.01 * ((number * 3) % 4 - 1)),
                              seconds=70.0 + 5 * (number % 4)))  # fmt: skip
    best = choices("none", "default", "rowwise", "2")
    second = choices("selective op", "default", "rowwise", "4")
    n = len(records)
    records += [
        record(n, STUCK, status=ProbeStatus.HANG, message="no step for 300 s after step 4", seconds=410.0),
        record(n + 1, BASE, 6405.0, role=Role.FINALIST, predicted=6900.0, active_gib=61.2, predicted_active_gib=60.8),
        record(n + 2, best, 8350.0, role=Role.FINALIST, predicted=8900.0, active_gib=74.8, predicted_active_gib=74.0,
               values={"activation_checkpoint.mode": "none", "compile.enable": True,
                       "model.converters": ["quantize.linear.float8"]},
               warnings=("the first 2 measured steps were slower than the rest",)),
        record(n + 3, second, 8010.0, role=Role.FINALIST, predicted=8600.0, active_gib=88.1, predicted_active_gib=88.9),
    ]  # fmt: skip
    return info(), records


def report(study_info: StudyInfo, records: list[TrialRecord], *, study: str = "llama3-8b") -> ReportData:
    """The report's data, made on a fixed day."""
    return report_data(
        study,
        study_info,
        records,
        made="2026-11-03T10:00:00+00:00",
        export_command=f"titan-tune export {study} -o best.toml",
    )


DRY_RUN_DETAILS = {
    "steps": 3,
    "dry_run": {
        "validity_only": False,
        "gpu": "h200",
        "world_size": 256,
        "relative_interval": 0.08,
        "ranks": [{"rank": 0, "pipeline_rank": 0, "active_gib": 60.0}],
    },
}
"""Of a dry run of one rank, as far as a report reads it; made before ``gpu_seconds`` was recorded."""


def dry_run(number: int, labels: dict[str, str], tokens_per_second: float, **changes: Any) -> TrialRecord:
    """A completed dry run of one rank."""
    low, high = 0.92 * tokens_per_second, 1.08 * tokens_per_second
    fields = {
        "details": DRY_RUN_DETAILS,
        "origin": Origin.DRY_RUN,
        "interval": (low, high),
        "losses": (),
        "memory": (RankMemory(0, 60 * GIB, 64 * GIB, 66 * GIB),),
        "measured_steps": 3,
        "warmup_steps": 2,
        "predicted": 1.05 * tokens_per_second,
        "predicted_active_gib": 59.0,
    }
    return record(number, labels, tokens_per_second, **(fields | changes))


FASTER = choices("none", "off", "off", "2")
OTHER = choices("full", "off", "off", "2")


def dry_run_study() -> tuple[StudyInfo, list[TrialRecord]]:
    """A job of 256 GPUs, of which every probe was a dry run; one ran out of memory."""
    return info(cluster=ClusterSpec(gpu=H200, gpus_per_node=8, num_nodes=32)), [
        dry_run(0, BASE, 614.0, role=Role.BASELINE),
        dry_run(1, FASTER, 1384.0),
        record(2, OTHER, message="rank 0 needs 150.0 GiB", details={"simulated_rank": 0, "rank": 0}),
    ]


def mixed_study(*, best_is_dry: bool = True) -> tuple[StudyInfo, list[TrialRecord]]:
    """A measured baseline and probe of 256 GPUs, and a dry run, which comes first or last."""
    return info(cluster=ClusterSpec(gpu=H200, gpus_per_node=8, num_nodes=32)), [
        record(0, BASE, 600.0, role=Role.BASELINE, predicted=660.0, predicted_active_gib=61.0),
        record(1, OTHER, 700.0, predicted=735.0, predicted_active_gib=61.0),
        dry_run(2, FASTER, 1384.0 if best_is_dry else 500.0),
    ]
