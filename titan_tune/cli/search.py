"""``titan-tune search``."""

from __future__ import annotations

import importlib.util
import json
import select
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_tune.cli import PROBE_PACKAGES, interrupt_on_terminate
from titan_tune.cli.console import stderr_console, stdout_console
from titan_tune.cli.private import private_files
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError, InterruptedSearchError, NothingFeasibleError, ProbesFailedError

if TYPE_CHECKING:
    from titan_tune.space.axes import Space
    from titan_tune.study.plan import Plan
    from titan_tune.study.records import TrialRecord
    from titan_tune.study.view import View

ON_INTERRUPT = ("ask", "leave", "cancel")
SCREENS = ("none", "dry-run")
ANSWER_SECONDS = 10.0
SEARCH_PACKAGES = ("optuna", "numpy", "sqlalchemy")
"""What a search needs where its probes run elsewhere."""


@dataclass(frozen=True)
class SearchOptions:
    """The command's arguments."""

    target: Path
    study: str | None = None
    storage: str | None = None
    runs_dir: Path = Path("runs")
    max_probes: int | None = None
    max_gpu_hours: float | None = None
    max_hours: float | None = None
    runner: str | None = None
    """``None``: the space's."""
    parallel: int | None = None
    on_interrupt: str = "ask"
    screen: str | None = None
    plan_only: bool = False
    gpus: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    gpu: str | None = None
    sets: tuple[str, ...] = ()
    hf_config: Path | None = None
    as_json: bool = False


def run_search(options: SearchOptions) -> int:
    """Search (or plan), print the summary, return the exit code."""
    from titan_tune.machine import local_cluster
    from titan_tune.probe.factory import needs_this_machines_devices, slurm_settings

    require_packages(SEARCH_PACKAGES)
    _check_options(options)
    machine = local_cluster()
    space = load(options, machine)
    runner = options.runner or space.probe.runner
    here = needs_this_machines_devices(runner)
    if here:
        require_packages(PROBE_PACKAGES)
    elif machine.gpu.is_cpu and not _names_a_gpu(options):
        raise InputError(f"--runner {runner}: this machine has no GPU; name the cluster's with --gpu")
    if space.slurm:
        slurm_settings(space.slurm, f"{space.name}: slurm")
    try:
        return _search(replace(options, runner=runner), space, machine)
    except KeyboardInterrupt:  # a second Ctrl-C, while the first was being dealt with
        directory = options.runs_dir / study_name(options)
        if not directory.is_dir():
            raise
        saved = f"what was measured is saved in {directory.absolute()}; the same command resumes"
        raise InterruptedSearchError(f"stopped at once; {saved}") from None


def _check_options(options: SearchOptions) -> None:
    """What can be said of the options before any file is read."""
    from titan_tune.probe.factory import check_runner
    from titan_tune.study import storage as store

    if options.runner is not None:
        check_runner(options.runner)
    if options.on_interrupt not in ON_INTERRUPT:
        raise InputError(f"--on-interrupt: {options.on_interrupt!r} is not one of: {', '.join(ON_INTERRUPT)}")
    if options.screen not in (None, *SCREENS):
        raise InputError(f"--screen: {options.screen!r} is not one of: {', '.join(SCREENS)}")
    if options.runs_dir.exists() and not options.runs_dir.is_dir():
        raise InputError(f"--runs-dir: {options.runs_dir} is a file; name a folder")
    store.check_storage(options.storage)
    store.study_directory(options.runs_dir, study_name(options))


def _names_a_gpu(options: SearchOptions) -> bool:
    """Whether the command or the file says which GPU the job is for."""
    from titan_tune.space.file import is_space_file
    from titan_tune.titan.job import parse_toml, read_text

    if options.gpu is not None or not is_space_file(options.target):
        return options.gpu is not None
    cluster = parse_toml(read_text(options.target), source=str(options.target)).get("cluster", {})
    return isinstance(cluster, dict) and "gpu" in cluster


def require_packages(names: Sequence[str]) -> None:
    """Say which packages a search lacks, before anything starts."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"search needs {', '.join(missing)}: pip install 'titan-tune[probe]'")


def load(options: SearchOptions, machine: ClusterSpec) -> Space:
    """The space of the command: a space file, or a job with the default axes; flags override the file."""
    from titan_tune.calibrate.store import calibrated
    from titan_tune.cli.target import cluster_from
    from titan_tune.space.default import space_from_job
    from titan_tune.space.file import is_space_file, load_space
    from titan_tune.titan.job import load_job

    asked = cluster_from(
        machine, gpus=options.gpus, nodes=options.nodes, gpus_per_node=options.gpus_per_node, gpu=options.gpu
    )
    given = asked if asked != machine else None
    if is_space_file(options.target):
        space = load_space(
            options.target, cluster=given, machine=machine, sets=options.sets, hf_config=options.hf_config
        )
    else:
        job = load_job(options.target, sets=options.sets, hf_config=options.hf_config)
        space = space_from_job(job, given or machine)
    space = replace(space, cluster=calibrated(space.cluster))
    return space.with_budget(
        max_probes=options.max_probes,
        max_gpu_hours=options.max_gpu_hours,
        max_wall_clock_hours=options.max_hours,
    )


def _search(options: SearchOptions, space: Space, machine: ClusterSpec) -> int:
    from titan_tune.report.search import plan_view
    from titan_tune.study.plan import make_plan

    console = stderr_console()
    plan = make_plan(space)
    console.print(plan_view(plan))
    if options.plan_only:
        if options.as_json:
            print(json.dumps(plan_data(plan), indent=1))
        return 0
    if not plan.pool:
        raise NothingFeasibleError("only the job as it is remains: nothing to search")
    return _run(options, plan, machine, console)


@dataclass(frozen=True)
class Ended:
    """What one search came to."""

    records: tuple[TrialRecord, ...]
    reason: str
    stopped: InterruptedSearchError | ProbesFailedError | None


def _run(options: SearchOptions, plan: Plan, machine: ClusterSpec, console: Any) -> int:
    from titan_tune.report.search import summary
    from titan_tune.study.numerics import winner_effects
    from titan_tune.study.storage import public_url

    name = study_name(options)
    interrupt_on_terminate()
    if (options.screen or plan.space.probe.screen) != "none":
        plan = _screen(options, plan, name, machine, console)
    ended = _search_study(options, plan, name, options.runner or plan.space.probe.runner, machine, console)
    if ended.reason:
        console.print(f"exploring ended: {ended.reason}", highlight=False)
    if ended.records:
        out = console if options.as_json else stdout_console()
        numerics, ranks = plan.space.numerics_axes, plan.space.cluster.world_size
        effects = winner_effects(plan.space.base, plan.space.cluster, ended.records)
        out.print(summary(ended.records, numerics_axes=numerics, layout_effects=effects, world_size=ranks))
    if options.as_json:
        print(json.dumps(result_data(name, ended.records, ended.reason), indent=1))
    if ended.stopped:
        raise ended.stopped
    export = ["titan-tune", "export", name]
    if options.runs_dir != SearchOptions.runs_dir:
        export += ["--runs-dir", str(options.runs_dir)]
    if options.storage is not None:
        export += ["--storage", public_url(options.storage)]
    console.print(f"next: {shlex.join(export)} -o best.toml", highlight=False, soft_wrap=True)
    if is_predicted(ended.records):
        console.print(
            "then: run it and the job as it is on the job's GPUs: this gain is predicted from dry runs",
            highlight=False,
            soft_wrap=True,
        )
    return 0


def is_predicted(records: Sequence[TrialRecord]) -> bool:
    """Whether a dry run has a part in what the best configuration is said to gain."""
    from titan_tune.domain.probe import Origin
    from titan_tune.study.selection import winner

    best = winner(records)
    return best is not None and best.gain_origin is Origin.DRY_RUN


def _screen(options: SearchOptions, plan: Plan, name: str, machine: ClusterSpec, console: Any) -> Plan:
    """The plan with what dry runs of its best candidates say."""
    from titan_tune.study.screen import screen_name, screen_plan, screened

    if plan.space.cluster.world_size == 1:
        console.print("a job of one GPU needs no dry runs: its probes cost the same", highlight=False)
        return plan
    console.print("screening: dry runs before the probes", highlight=False)
    ended = _search_study(options, screen_plan(plan), screen_name(name), "dry-run", machine, console)
    if isinstance(ended.stopped, InterruptedSearchError):
        raise ended.stopped
    if ended.stopped:
        console.print(f"no dry run came to anything, going on without: {ended.stopped}", highlight=False)
    return screened(plan, ended.records)


def _search_study(
    options: SearchOptions, plan: Plan, name: str, runner_name: str, machine: ClusterSpec, console: Any
) -> Ended:
    """One search of one study, from its lock to its last record."""
    from titan_tune.machine import environment
    from titan_tune.probe.factory import RunnerRequest, make_runner
    from titan_tune.report.search import make_view
    from titan_tune.study import storage as store
    from titan_tune.study.choose import make_sampler
    from titan_tune.study.info import join, new_info
    from titan_tune.study.search import Search

    space = plan.space
    directory = store.study_directory(options.runs_dir, name).absolute()
    url = store.storage_url(directory, options.storage)
    device = "cpu" if space.cluster.gpu.is_cpu else "cuda"
    request = RunnerRequest(
        cluster=space.cluster,
        machine=machine,
        device=device,
        study=name,
        directory=directory,
        parallel=options.parallel if runner_name == options.runner else None,
        slurm=space.slurm,
        source=f"{space.name}: slurm",
    )
    with ExitStack() as held:
        held.enter_context(private_files())
        runner = held.enter_context(closing(make_runner(runner_name, request)))
        if options.storage is None:
            held.enter_context(store.search_lock(directory, name))
        sampler = make_sampler(plan)
        stored = store.stored_name(name, url) if options.storage is None else name
        study = store.create_or_load(stored, url, sampler=sampler)
        store.private_directory(directory)
        with store.storage_errors(url):
            join(study, new_info(plan, device=device, environment=environment()))
        with make_view(console) as view:
            view.note(f"study {name} in {directory}")
            search = Search(
                plan, study, sampler, runner, directory, view,
                url=url, device=device, leave=partial(leave_running, options.on_interrupt, view),
            )  # fmt: skip
            try:
                reason = search.run()
                return Ended(search.records, reason, None)
            except (InterruptedSearchError, ProbesFailedError) as error:
                return Ended(search.records, "", error)


def leave_running(choice: str, view: View, probes: int) -> bool:
    """Whether jobs go on without the search: as ``--on-interrupt`` says, or as the user answers in time."""
    if choice != "ask":
        return choice == "leave"
    if not sys.stdin.isatty():
        return False
    view.note(
        f"{probes} job{'s' if probes > 1 else ''} in flight: l + Enter leaves them for the same command to find;"
        f" anything else, or {ANSWER_SECONDS:.0f} s, cancels them"
    )
    ready, _, _ = select.select([sys.stdin], [], [], ANSWER_SECONDS)
    return bool(ready) and sys.stdin.readline().strip().lower() in ("l", "leave")


def study_name(options: SearchOptions) -> str:
    """``--study``, or the name of the file."""
    return options.study if options.study is not None else options.target.stem or "study"


def plan_data(plan: Plan) -> dict[str, Any]:
    """The plan as ``--plan --json`` prints it."""
    return {
        "schema": 1,
        "total": plan.total,
        "duplicates": plan.duplicates,
        "rejected": dict(plan.rejected),
        "baseline": plan.baseline.candidate.config_id if plan.baseline else None,
        "candidates": [
            {
                "config_id": r.candidate.config_id,
                "choices": dict(r.candidate.choices),
                "predicted_tokens_per_second_per_gpu": r.step_time.tokens_per_second_per_gpu
                if r.step_time
                else None,
                "peak_active_gib": r.memory.active_bytes / 2**30 if r.memory else None,
            }
            for r in plan.pool
        ],
    }


def result_data(name: str, records: tuple[TrialRecord, ...], reason: str) -> dict[str, Any]:
    """The result as ``--json`` prints it."""
    from titan_tune.probe.record import outcome_to_dict
    from titan_tune.study.selection import winner

    best = winner(records)
    return {
        "schema": 1,
        "study": name,
        "ended": reason,
        "best": {
            "config_id": best.standing.config_id,
            "trial": best.standing.latest.number,
            "choices": dict(best.standing.latest.choices),
            "origin": str(best.standing.origin),
            "tokens_per_second_per_gpu": best.standing.tokens_per_second,
            "interval": list(best.standing.interval),
            "gain_over_baseline": best.gain,
            "gain_origin": str(best.gain_origin),
        }
        if best
        else None,
        "trials": [
            {
                "number": r.number,
                "config_id": r.config_id,
                "role": str(r.role),
                "origin": str(r.outcome.origin),
                "choices": dict(r.choices),
                "predicted": dict(r.predicted),
                "outcome": outcome_to_dict(r.outcome),
            }
            for r in records
        ],
    }
