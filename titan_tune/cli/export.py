"""``titan-tune export``."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_tune.cli.console import stderr_console
from titan_tune.cli.files import write_result
from titan_tune.cli.studies import opened_study
from titan_tune.errors import InputError, ProbesFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from titan_tune.export import Export
    from titan_tune.study.open import OpenStudy
    from titan_tune.study.selection import Standing, Winner
    from titan_tune.study.trend import Check

FORMATS = ("toml", "command", "sbatch", "python")
NAMES = {"sbatch": "best.sh", "python": "best.py"}
"""The default output of formats that are not a TOML."""
SCHEMA = 1
OWN_FILE = "# titan-tune "
"""How a file that titan-tune may replace begins; a script has it in its second line."""


def run_export(
    study: str,
    *,
    output: Path | None,
    trial: int | None,
    pareto: bool,
    format_name: str,
    storage: str | None,
    runs_dir: Path,
    force: bool,
    as_json: bool = False,
) -> int:
    """Write the chosen configuration(s); returns the exit code.

    ``output`` is the file to write, with ``pareto`` the folder of the files. For the format ``sbatch`` it is the
    script, which gets its TOML beside it; for ``command`` the TOML that the printed command runs; for ``python`` the
    recipe, and nothing beside it. With ``as_json`` stdout gets one JSON object and nothing else.

    Raises:
        InputError: no such study or trial, options that exclude each other, a file in the way, or for ``python`` a
            model that torchtitan 0.3.0 does not have.
        ProbesFailedError: nothing was measured.
    """
    from titan_tune.export import configuration_json
    from titan_tune.study.selection import winner
    from titan_tune.study.trend import standing_checks, study_checks

    if format_name not in FORMATS:
        raise InputError(f"--format: {format_name!r} is not one of: {', '.join(FORMATS)}")
    if trial is not None and pareto:
        raise InputError("--trial and --pareto exclude each other")
    opened = opened_study(study, storage=storage, runs_dir=runs_dir)
    best = winner(opened.records)
    if best is None:
        raise ProbesFailedError(f"study {opened.name!r} has no measured configuration yet")
    output = output or Path("front" if pareto else NAMES.get(format_name, "best.toml"))
    if output.is_dir() and not pareto:
        raise InputError(f"-o: {output} is a folder; name a file in it")
    checks = study_checks(opened.info, opened.records)
    rows: list[dict[str, Any]] = []
    for standing, path in chosen(opened, best.standing, output, trial=trial, pareto=pareto):
        order = Order(opened, best, standing, path, standing_checks(standing, checks), format_name, force)
        written = write_recipe(order) if format_name == "python" else write_job(order, quiet=as_json)
        rows.append(written_json(written) | configuration_json(opened.info, standing, best))
    if as_json:
        head = {"schema": SCHEMA, "study": opened.name, "format": format_name}
        print(json.dumps(head | {"exports": rows}, indent=1, default=str))
    return 0


@dataclass(frozen=True, slots=True)
class Order:
    """One configuration to be written."""

    opened: OpenStudy
    best: Winner
    standing: Standing
    path: Path
    checks: Sequence[Check]
    format_name: str
    force: bool


@dataclass(frozen=True, slots=True)
class Written:
    """What became of it."""

    files: tuple[Path, ...]
    """The one to run first."""
    command: tuple[str, ...]
    """Word by word; in a rendezvous ``$MASTER_ADDR`` is the shell's."""
    torchtitan: str
    """The version that the file is for."""
    needs: tuple[str, ...] = ()
    """Why titan-tune has to be installed beside torchtitan, one line each; empty when it need not."""
    warnings: tuple[str, ...] = ()
    """Trend checks that are not ok, and what was not carried over."""


def written_json(written: Written) -> dict[str, Any]:
    """The files as ``--json`` prints them."""
    return {
        "files": [str(path) for path in written.files],
        "torchtitan": written.torchtitan,
        "command": list(written.command),
        "needs_titan_tune": list(written.needs),
        "warnings": list(written.warnings),
    }


def chosen(
    opened: OpenStudy, best: Standing, output: Path, *, trial: int | None, pareto: bool
) -> list[tuple[Standing, Path]]:
    """What to write, and where."""
    from titan_tune.study.selection import pareto_front, standing_of_trial

    if pareto:
        return [(s, output / f"{s.config_id}.toml") for s in pareto_front(opened.records)]
    return [(standing_of_trial(opened.records, trial) if trial is not None else best, output)]


def write_job(order: Order, *, quiet: bool) -> Written:
    """Write one configuration as a TOML, for ``sbatch`` with its script; ``quiet`` keeps the command off stdout."""
    from titan_tune.estimate.answer import TORCHTITAN
    from titan_tune.export import command_text, export

    toml, script = order.path, None
    if order.format_name == "sbatch":
        toml = order.path.with_suffix(".toml")
        script = order.path if order.path != toml else order.path.with_suffix(".sh")
    opened, standing = order.opened, order.standing
    exported = export(opened.info, opened.name, standing, winner=order.best, output=toml, checks=order.checks)
    write_file(toml, exported.toml, force=order.force)
    say(f"wrote {toml}: {speed(standing)}")
    warnings = [f"trend check {problem}" for problem in exported.problems]
    for warning in warnings:
        say(f"warning: {warning}")
    if script is not None:
        write_script(script, exported, opened, toml, force=order.force)
    elif order.format_name == "command" and not quiet:
        print(command_text(exported.command))
    else:
        say(f"run it: {command_text(exported.command)}")
    command = exported.command if script is None else ("sbatch", script_name(script))
    files = (toml,) if script is None else (script, toml)
    return Written(files, command, TORCHTITAN, exported.reasons, tuple(warnings))


def write_recipe(order: Order) -> Written:
    """Write one configuration as a Python recipe; in a Pareto front's folder its name becomes a module's."""
    from titan_tune.export import command_text
    from titan_tune.export_recipe import export_recipe, front_name
    from titan_tune.titan.recipe_keys import VERSION

    path, standing = order.path, order.standing
    if path.name == f"{standing.config_id}.toml":
        path = path.with_name(front_name(standing.config_id))
    exported = export_recipe(
        order.opened.info, order.opened.name, standing, winner=order.best, output=path, checks=order.checks
    )
    write_file(path, exported.text, force=order.force)
    say(
        f"wrote {path}: {speed(standing)}; a recipe for torchtitan {VERSION}, with which nothing was measured"
    )
    warnings = [f"trend check {problem}" for problem in exported.problems]
    warnings += [f"not carried over: {line}" for line in exported.lost]
    for warning in warnings:
        say(f"warning: {warning}")
    say(f"run it: {command_text(exported.command)}")
    return Written((path,), exported.command, VERSION, warnings=tuple(warnings))


def speed(standing: Standing) -> str:
    """Throughput and where it is from."""
    return f"{standing.tokens_per_second:,.0f} tokens/s per GPU ({standing.origin})"


def write_script(path: Path, exported: Export, opened: OpenStudy, toml: Path, *, force: bool) -> None:
    """Write the batch script beside its TOML; the job runs in the current folder, as the search did."""
    from titan_tune.export_sbatch import export_sbatch
    from titan_tune.probe.factory import slurm_settings

    settings = slurm_settings(opened.info.slurm, f"study {opened.name}: slurm")
    toml, log = toml.absolute(), path.absolute().with_suffix(".log")
    write_file(
        path,
        export_sbatch(exported, opened.info, settings, toml=toml, log=log, workdir=Path.cwd()),
        force=force,
        executable=True,
    )
    say(f"wrote {path}; its log will be {log}")
    say(f"submit it: sbatch {shlex.quote(script_name(path))}")


def script_name(path: Path) -> str:
    """A script as a command's argument; a name that begins with ``-`` is no option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def say(text: str) -> None:
    """One line on stderr, as it is."""
    stderr_console().print(text, highlight=False, markup=False, soft_wrap=True)


def write_file(path: Path, text: str, *, force: bool, executable: bool = False) -> None:
    """Write a result; an existing file is only replaced when it is titan-tune's own or ``force`` is set."""
    write_result(path, text, is_own=_is_own, option="-o", force=force, mode=0o755 if executable else 0o644)


def _is_own(head: str) -> bool:
    return head.removeprefix("#!/bin/bash\n").startswith(OWN_FILE)
