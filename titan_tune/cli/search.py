"""``titan-tune search``."""

from __future__ import annotations

import importlib.util
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_tune.cli import PROBE_PACKAGES, interrupt_on_terminate
from titan_tune.cli.console import stderr_console, stdout_console
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError, InterruptedSearchError, NothingFeasibleError, ProbesFailedError

if TYPE_CHECKING:
    from titan_tune.space.axes import Space
    from titan_tune.study.plan import Plan
    from titan_tune.study.records import TrialRecord


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
    runner: str = "local"
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

    if options.runner != "local":
        raise InputError(f"--runner: {options.runner!r} is not one of: local")
    require_probe_packages()
    machine = local_cluster()
    space = load(options, machine)
    return _search(options, space, machine)


def require_probe_packages() -> None:
    """Say which packages a search lacks, before anything starts."""
    missing = [name for name in PROBE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"search needs {', '.join(missing)}: pip install 'titan-tune[probe]'")


def load(options: SearchOptions, machine: ClusterSpec) -> Space:
    """The space of the command: a space file, or a job with the default axes; flags override the file."""
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
    check_machine(space.cluster, machine)
    return _run(options, plan, console)


def check_machine(cluster: ClusterSpec, machine: ClusterSpec) -> None:
    """A local search needs the job's GPUs here."""
    if cluster.num_nodes > 1:
        raise InputError(f"--runner local runs on one node, the job asks for {cluster.num_nodes}")
    if cluster.gpu.is_cpu != machine.gpu.is_cpu:
        raise InputError(f"the job is for {cluster.gpu.name}, this machine has {machine.gpu.name}")
    if not machine.gpu.is_cpu and cluster.gpus_per_node > machine.gpus_per_node:
        raise InputError(
            f"the job needs {cluster.gpus_per_node} GPUs, this machine has {machine.gpus_per_node}"
        )


def _run(options: SearchOptions, plan: Plan, console: Any) -> int:
    from titan_tune.machine import environment
    from titan_tune.probe.local import LocalRunner
    from titan_tune.report.search import make_view, summary
    from titan_tune.study import storage as store
    from titan_tune.study.info import join, new_info
    from titan_tune.study.records import records_of
    from titan_tune.study.search import Search, make_sampler

    name = options.study or default_name(options.target)
    directory = store.study_directory(options.runs_dir, name).absolute()
    url = store.storage_url(directory, options.storage)
    device = "cpu" if plan.space.cluster.gpu.is_cpu else "cuda"
    interrupt_on_terminate()
    with store.search_lock(directory, name):
        sampler = make_sampler(plan)
        study = store.create_or_load(name, url, sampler=sampler)
        with store.storage_errors(url):
            join(study, new_info(plan, device=device, environment=environment()))
        runner = LocalRunner(plan.space.cluster.gpus_per_node, device)
        stopped: InterruptedSearchError | ProbesFailedError | None = None
        reason = ""
        with make_view(console) as view:
            view.note(f"study {name} in {directory}")
            try:
                reason = Search(plan, study, sampler, runner, directory, view, url=url, device=device).run()
            except (InterruptedSearchError, ProbesFailedError) as error:
                stopped = error
        records = records_of(study)
    if reason:
        console.print(f"exploring ended: {reason}", highlight=False)
    if records:
        world_size = plan.space.cluster.world_size
        out = console if options.as_json else stdout_console()
        out.print(summary(records, numerics_axes=plan.space.numerics_axes, world_size=world_size))
    if options.as_json:
        print(json.dumps(result_data(name, records, reason), indent=1))
    if stopped:
        raise stopped
    where = (
        ""
        if options.runs_dir == SearchOptions.runs_dir
        else f" --runs-dir {shlex.quote(str(options.runs_dir))}"
    )
    console.print(
        f"next: titan-tune export {shlex.quote(name)}{where} -o best.toml", highlight=False, soft_wrap=True
    )
    return 0


def default_name(target: Path) -> str:
    """Study name from a file name."""
    return target.stem or "study"


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
            "tokens_per_second_per_gpu": best.standing.tokens_per_second,
            "interval": list(best.standing.interval),
            "gain_over_baseline": best.gain,
        }
        if best
        else None,
        "trials": [
            {
                "number": r.number,
                "config_id": r.config_id,
                "role": str(r.role),
                "choices": dict(r.choices),
                "predicted": dict(r.predicted),
                "outcome": outcome_to_dict(r.outcome),
            }
            for r in records
        ],
    }
