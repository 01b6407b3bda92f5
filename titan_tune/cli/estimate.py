"""``titan-tune estimate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_tune.cli.target import cluster_from
from titan_tune.domain.candidate import Value
from titan_tune.errors import InputError, NothingFeasibleError
from titan_tune.estimate.answer import SCHEMA, Answer, answer, answer_json
from titan_tune.estimate.memory import METHOD
from titan_tune.machine import local_cluster
from titan_tune.titan.job import load_job
from titan_tune.titan.keys import parse_assignment
from titan_tune.titan.settings import settings_from

if TYPE_CHECKING:
    from rich.console import Console

    from titan_tune.domain.cluster import ClusterSpec
    from titan_tune.titan.job import Job

INVALID = NothingFeasibleError.exit_code


def run_estimate(
    job_path: Path,
    *,
    gpus: int | None,
    nodes: int | None,
    gpus_per_node: int | None,
    gpu: str | None,
    sets: Sequence[str],
    hf_config: Path | None,
    sweep: str | None,
    method: str,
    as_json: bool,
    console: Console,
) -> int:
    """Print the estimate of a job; the exit code: 0, or 3 when the rules reject the job.

    Raises:
        InputError: bad file, key, value, GPU or method, or a model that the formula does not cover.
    """
    if method != METHOD:
        raise InputError(f"--method: {method!r} does not exist; methods: {METHOD}")
    job = load_job(job_path, sets=sets, hf_config=hf_config)
    cluster = cluster_from(local_cluster(), gpus=gpus, nodes=nodes, gpus_per_node=gpus_per_node, gpu=gpu)
    if sweep is not None:
        return _run_sweep(job, cluster, sweep, as_json=as_json, console=console)
    result = _answer(job, cluster)
    if as_json:
        _print_json(console, answer_json(result))
    else:
        from titan_tune.report.estimate import view

        console.print(view(result))
    return INVALID if result.invalid else 0


def _answer(job: Job, cluster: ClusterSpec, *, advise: bool = True) -> Answer:
    values = job.resolved()
    return answer(settings_from(values, job.model, cluster), values, advise=advise)


def _print_json(console: Console, document: object) -> None:
    console.file.write(json.dumps(document, indent=2) + "\n")


def sweep_values(sweep: str) -> tuple[str, tuple[tuple[str, Value], ...]]:
    """``KEY=V1,V2,…`` as the key and its ``(text, value)`` pairs.

    Raises:
        InputError: no ``=``, no value, an unknown key or a value that it does not take.
    """
    key, separator, texts = sweep.partition("=")
    if not separator or not texts.strip():
        raise InputError(f"--sweep: {sweep!r} is not KEY=V1,V2,…")
    parsed = []
    for text in (part.strip() for part in texts.split(",")):
        key, value = parse_assignment(f"{key}={text}", source="--sweep")
        parsed.append((text, value))
    return key, tuple(parsed)


def _run_sweep(job: Job, cluster: ClusterSpec, sweep: str, *, as_json: bool, console: Console) -> int:
    key, choices = sweep_values(sweep)
    answers = [
        (text, _answer(job.with_values({key: value}), cluster, advise=False)) for text, value in choices
    ]
    if as_json:
        rows = [
            {"value": value, **answer_json(result)}
            for (_, value), (_, result) in zip(choices, answers, strict=True)
        ]
        _print_json(console, {"schema": SCHEMA, "sweep": key, "rows": rows})
    else:
        from titan_tune.report.estimate import sweep_view

        console.print(sweep_view(key, answers))
    return INVALID if all(result.invalid for _, result in answers) else 0
