"""The result as a file: the user's own TOML with the winning values and where they come from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import titan_tune
from titan_tune.catalog.typed import printable
from titan_tune.domain.candidate import Value
from titan_tune.domain.probe import Origin
from titan_tune.probe.launch import ALLOCATOR
from titan_tune.probe.toml import PLUGIN, PLUGIN_CONFIG
from titan_tune.report.search import percent, tokens
from titan_tune.study.info import StudyInfo
from titan_tune.study.numerics import layout_effects
from titan_tune.study.records import TrialRecord
from titan_tune.study.selection import Standing, Winner
from titan_tune.study.trend import Check, problems
from titan_tune.titan.job import Job, render
from titan_tune.units import format_gib, gib

RENDEZVOUS = "--rdzv-endpoint=$MASTER_ADDR:29500"
"""The one word of a command that the shell expands."""


@dataclass(frozen=True)
class Export:
    """A rendered result."""

    toml: str
    command: tuple[str, ...]
    needs_plugin: bool
    """Whether the file only runs where titan-tune is installed beside torchtitan."""
    comments: tuple[str, ...] = ()
    """What stands at the top of every exported file: where the result is from, what to know before it runs."""
    problems: tuple[str, ...] = ()
    """Trend checks that are not ok, one line each; they are among the comments."""
    reasons: tuple[str, ...] = ()
    """Why it needs the plug-in, one line each."""


def plugin_reasons(job: Job, *, device: str) -> list[str]:
    """Why a job needs titan-tune's plug-in at run time; empty when plain torchtitan runs it."""
    reasons = []
    if device == "cpu":
        reasons.append("torchtitan itself does not start without an accelerator")
    if job.model_args:
        reasons.append(f"model flavor {job.model.flavor} is defined in [titan_tune.model_args]")
    if job.get("compile.enable") and job.get("titan_tune.compile_mode") not in (None, "default"):
        reasons.append(f"compile mode {job.get('titan_tune.compile_mode')} has no torchtitan key")
    if job.get("titan_tune.data") == "synthetic":
        reasons.append("the job trains on synthetic tokens")
    return reasons


def plugin_values(job: Job, *, device: str) -> dict[str, Value]:
    """The keys that load the plug-in, keeping an import of the user's own; none when it is not needed."""
    if not plugin_reasons(job, device=device):
        return {}
    values: dict[str, Value] = {
        "job.custom_config_module": PLUGIN_CONFIG,
        "experimental.custom_import": PLUGIN,
    }
    own = job.get("experimental.custom_import")
    if own and own != PLUGIN:
        values["titan_tune.custom_import"] = own
    return values


def launch_command(
    toml: Path, *, num_nodes: int, gpus_per_node: int, device: str = "cuda"
) -> tuple[str, ...]:
    """The plain torchrun command for one file, in the allocator mode that was measured."""
    allocator = ("env", f"PYTORCH_ALLOC_CONF={ALLOCATOR}") if device == "cuda" else ()
    return (*allocator, *torchrun(num_nodes, gpus_per_node), *training_arguments(toml))


def torchrun(num_nodes: int, gpus_per_node: int) -> tuple[str, ...]:
    """torchrun with its own options."""
    rendezvous = ["--standalone"] if num_nodes == 1 else [
        f"--nnodes={num_nodes}", "--rdzv-backend=c10d", RENDEZVOUS,
    ]  # fmt: skip
    return "torchrun", *rendezvous, f"--nproc-per-node={gpus_per_node}"


def training_arguments(toml: Path) -> tuple[str, ...]:
    """What torchrun runs: torchtitan with one job file. A name that begins with ``-`` is no option."""
    name = str(toml)
    return "-m", "torchtitan.train", "--job.config_file", f"./{name}" if name.startswith("-") else name


def command_text(command: Sequence[str]) -> str:
    """The command as a shell line; ``$MASTER_ADDR`` stays a variable."""
    return " ".join(f'"{word}"' if word == RENDEZVOUS else shlex.quote(word) for word in command)


def export(
    info: StudyInfo,
    study_name: str,
    standing: Standing,
    *,
    winner: Winner | None,
    output: Path,
    checks: Sequence[Check] = (),
) -> Export:
    """Render one measured configuration of a study.

    ``winner`` gives the baseline that the gain is stated against; ``checks`` are the configuration's trend checks.
    """
    base = info.base()
    record = standing.latest
    changed = dict(record.values)
    job = base.with_values(changed)
    reasons = plugin_reasons(job, device=info.device)
    changed |= plugin_values(job, device=info.device)
    command = launch_command(
        output,
        num_nodes=info.cluster.num_nodes,
        gpus_per_node=info.cluster.gpus_per_node,
        device=info.device,
    )
    found = problems(checks)
    comments = [
        *provenance(info, study_name, standing, winner),
        *[f"trend check: {problem}" for problem in found],
        *[f"needs titan-tune beside torchtitan: {reason}" for reason in reasons],
        *changed_keys(base, record.values),
        f"launch: {command_text(command)}",
    ]  # fmt: skip
    lines = tuple(map(printable, comments))
    return Export(render(base, changed, comments=lines), command, bool(reasons), lines, found, tuple(reasons))


def provenance(info: StudyInfo, study_name: str, standing: Standing, winner: Winner | None) -> list[str]:
    """Where the numbers come from, one comment a line."""
    record, measurement = standing.latest, standing.latest.measurement
    low, high = standing.interval
    dry = standing.origin is Origin.DRY_RUN
    speed = f"{tokens(standing.tokens_per_second)} tokens/s per GPU"
    spread = f"{'interval' if dry else '95 % interval'} {tokens(low)} to {tokens(high)}"
    lines = [
        f"titan-tune {titan_tune.__version__}: study {study_name}, trial {record.number},"
        f" configuration {standing.config_id}, study of {info.created}",
        f"{standing.origin}: {speed}, {spread}, {len(standing.runs)} run(s)",
    ]
    if dry:
        lines.append(
            "not measured on all GPUs: one rank of each kind ran alone on one GPU; communication and pipeline"
            " bubble were computed"
        )
    if measurement:
        kind = "resident set size" if measurement.memory_kind == "rss" else "active"
        memory = f"peak memory: {format_gib(measurement.peak_active_bytes)} {kind}"
        if measurement.memory_kind != "rss":
            memory += (
                f", {format_gib(measurement.peak_reserved_bytes)} reserved,"
                f" {format_gib(measurement.peak_device_bytes)} on the device"
            )
        lines.append(memory)
    if winner and winner.baseline and winner.baseline.config_id != standing.config_id:
        gain = standing.tokens_per_second / winner.baseline.tokens_per_second - 1.0
        lines.append(
            f"gain: {percent(gain)} over the job as it was"
            f" ({tokens(winner.baseline.tokens_per_second)} tokens/s per GPU)"
        )
    lines.append(f"on: {hardware(info)}")
    lines += [
        f"changes numerics: {axis} = {record.choices[axis]}"
        for axis in numerics_changes(info, record, winner)
    ]
    start = winner.baseline.latest.values if winner and winner.baseline else {}
    lines += [
        f"changes numerics: {effect}"
        for effect in layout_effects(info.base(), info.cluster, record.values, start)
    ]
    return lines


def hardware(info: StudyInfo) -> str:
    """GPUs and versions in one line."""
    cluster, environment = info.cluster, info.environment
    found = {**environment.get("packages", {}), "driver": environment.get("driver")}
    names = ("torch", "torchtitan", "torchao", "driver")
    versions = ", ".join(f"{name} {found[name]}" for name in names if found.get(name))
    count = cluster.num_nodes * cluster.gpus_per_node
    return f"{count} x {environment.get('gpu') or cluster.gpu.name}; {versions}"


def numerics_changes(info: StudyInfo, record: TrialRecord, winner: Winner | None) -> list[str]:
    """Numerics-changing axes whose value differs from the baseline's."""
    base = winner.baseline.latest.choices if winner and winner.baseline else {}
    return [
        axis
        for axis in info.numerics_axes
        if axis in record.choices and record.choices[axis] != base.get(axis)
    ]


def changed_keys(base: Job, values: Mapping[str, Value]) -> list[str]:
    """What a configuration sets otherwise than the job as it was, one line a key."""
    return [
        f"set by titan-tune: {key} = {_shown(base.get(key))} -> {_shown(value)}"
        for key, value in sorted(values.items())
        if base.get(key) != value
    ]


def configuration_json(info: StudyInfo, standing: Standing, winner: Winner | None) -> dict[str, Any]:
    """One configuration and its figures as ``export --json`` prints them: those of its file's comments.

    ``overrides`` are torchtitan keys that differ from the job as it was; ``predicted`` is the formula's answer, empty
    where it had none. Memory is GiB, of the worst rank.
    """
    record, measurement, base = standing.latest, standing.latest.measurement, info.base()
    baseline = winner.baseline if winner else None
    is_baseline = baseline is not None and baseline.config_id == standing.config_id
    gain = Winner(standing, baseline) if baseline is not None and not is_baseline else None
    return {
        "config_id": standing.config_id,
        "trial": record.number,
        "is_baseline": is_baseline,
        "choices": dict(record.choices),
        "overrides": {
            key: {"before": base.get(key), "after": value}
            for key, value in sorted(record.values.items())
            if base.get(key) != value
        },
        "origin": str(standing.origin),
        "tokens_per_second_per_gpu": standing.tokens_per_second,
        "interval": list(standing.interval),
        "runs": len(standing.runs),
        "gain_over_baseline": gain.gain if gain else None,
        "gain_origin": str(gain.gain_origin) if gain else None,
        "baseline_tokens_per_second_per_gpu": baseline.tokens_per_second if baseline else None,
        "memory": {
            "kind": measurement.memory_kind,
            "peak_active_gib": gib(measurement.peak_active_bytes),
            "peak_reserved_gib": gib(measurement.peak_reserved_bytes),
            "peak_device_gib": gib(measurement.peak_device_bytes),
        }
        if measurement
        else None,
        "predicted": dict(record.predicted),
        "numerics_changes": {axis: record.choices[axis] for axis in numerics_changes(info, record, winner)},
        "layout_effects": list(
            layout_effects(
                info.base(), info.cluster, record.values, baseline.latest.values if baseline else {}
            )
        ),
    }


def _shown(value: Value) -> str:
    return "unset" if value is None else repr(value)
