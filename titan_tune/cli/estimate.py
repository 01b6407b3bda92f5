"""``titan-tune estimate``."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from titan_tune.calibrate.store import calibrated
from titan_tune.cli.console import stderr_console
from titan_tune.cli.files import write_result
from titan_tune.cli.target import cluster_from
from titan_tune.domain.candidate import Value
from titan_tune.errors import InputError, NothingFeasibleError, did_you_mean
from titan_tune.estimate.answer import SCHEMA, Answer, answer, answer_json
from titan_tune.estimate.memory import METHOD as FORMULA
from titan_tune.machine import local_cluster
from titan_tune.space.file import is_space_file
from titan_tune.titan.job import load_job
from titan_tune.titan.keys import parse_assignment
from titan_tune.titan.settings import settings_from

if TYPE_CHECKING:
    from rich.console import Console

    from titan_tune.domain.cluster import ClusterSpec
    from titan_tune.titan.job import Job

INVALID: Final = NothingFeasibleError.exit_code
TRACE: Final = "trace"
DRY_RUN: Final = "dry-run"
METHODS: Final = (FORMULA, TRACE, DRY_RUN)
NEEDED_TO_RUN: Final = ("torch", "torchtitan")


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
    html: Path | None = None,
    force: bool = False,
    accounting: bool = False,
) -> int:
    """Print the estimate of a job, and write the page; the exit code: 0, or 3 when the rules reject the job.

    ``force`` lets the page replace a file that is not an earlier page.

    Raises:
        InputError: bad file, key, value, GPU or method, a model that the formula does not cover, options
            that exclude each other, a file in the way of the page, a trace without torchtitan or one that broke.
    """
    _check_options(method, sweep=sweep, html=html, accounting=accounting)
    if is_space_file(job_path):
        raise InputError(
            f"{job_path}: is a search space, not a job: search {job_path} --plan shows the estimates of its candidates"
        )
    job = load_job(job_path, sets=sets, hf_config=hf_config)
    if not {"model.name", "model.flavor"} & job.values.keys():
        note = f"{job_path}: names no model; torchtitan's default is {job.model.name} {job.model.flavor}"
        stderr_console().print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
    cluster = calibrated(
        cluster_from(local_cluster(), gpus=gpus, nodes=nodes, gpus_per_node=gpus_per_node, gpu=gpu)
    )
    if sweep is not None:
        return _run_sweep(job, cluster, sweep, method, as_json=as_json, console=console)
    result = _answer(job, cluster, method, gpus_per_node=gpus_per_node)
    if accounting and result.memory is not None:
        from titan_tune.estimate.accounting import accounting as account

        result = replace(result, accounting=account(result.settings))
    if html is not None:
        _write_page(html, result, job.name, force=force)
    if as_json:
        _print_json(console, answer_json(result))
    else:
        from titan_tune.report.dry_run import dry_run_view

        console.print(dry_run_view(result))
        if html is not None:
            console.print(f"\npage: {html}", highlight=False, soft_wrap=True)
    return INVALID if result.invalid else 0


def _check_options(method: str, *, sweep: str | None, html: Path | None, accounting: bool) -> None:
    if method not in METHODS:
        near = did_you_mean(method, METHODS)
        raise InputError(f"--method: {method!r} does not exist{near}; methods: {', '.join(METHODS)}")
    if sweep is not None and (html is not None or accounting):
        other = "--html" if html is not None else "--accounting"
        raise InputError(f"--sweep and {other} exclude each other: a sweep is one table")
    missing = [name for name in NEEDED_TO_RUN if method != FORMULA and importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"--method {method}: it runs the real torchtitan model, and {' and '.join(missing)} cannot be imported: "
            "pip install 'titan-tune[probe]', or use --method formula"
        )


def _answer(
    job: Job, cluster: ClusterSpec, method: str, *, advise: bool = True, gpus_per_node: int | None = None
) -> Answer:
    if method == DRY_RUN:
        from titan_tune.cli.dry_run import dry_run_answer

        return dry_run_answer(job, cluster, stderr_console())
    values = job.resolved()
    settings = settings_from(values, job.model, cluster)
    trace = None
    if method == TRACE:
        from titan_tune.cli.tracing import tracer

        trace = tracer(job, settings, values)
    return answer(settings, values, advise=advise, trace=trace, gpus_per_node=gpus_per_node)


def _write_page(path: Path, result: Answer, job_name: str, *, force: bool) -> None:
    from titan_tune.report.memory_html import GENERATOR, render_memory_html

    def is_own(head: str) -> bool:
        return f'content="{GENERATOR}' in head

    write_result(path, render_memory_html(result, job_name), is_own=is_own, option="--html", force=force)


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


def _run_sweep(
    job: Job, cluster: ClusterSpec, sweep: str, method: str, *, as_json: bool, console: Console
) -> int:
    key, choices = sweep_values(sweep)
    answers = [
        (text, _answer(job.with_values({key: value}), cluster, method, advise=False))
        for text, value in choices
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
