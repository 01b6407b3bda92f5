"""``titan-tune export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from titan_tune.cli.console import stderr_console
from titan_tune.cli.files import write_result
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
) -> int:
    """Write the chosen configuration(s); returns the exit code.

    ``output`` is the file to write, with ``pareto`` the folder of the files. For the format ``sbatch`` it is the
    script, which gets its TOML beside it; for ``command`` the TOML that the printed command runs; for ``python`` the
    recipe, and nothing beside it.

    Raises:
        InputError: no such study or trial, options that exclude each other, a file in the way, or for ``python`` a
            model that torchtitan 0.3.0 does not have.
        ProbesFailedError: nothing was measured.
    """
    from titan_tune.export import command_text, export
    from titan_tune.study.open import open_study
    from titan_tune.study.selection import winner
    from titan_tune.study.trend import standing_checks, study_checks

    if format_name not in FORMATS:
        raise InputError(f"--format: {format_name!r} is not one of: {', '.join(FORMATS)}")
    if trial is not None and pareto:
        raise InputError("--trial and --pareto exclude each other")
    opened = open_study(study, storage=storage, runs_dir=runs_dir)
    best = winner(opened.records)
    if best is None:
        raise ProbesFailedError(f"study {opened.name!r} has no measured configuration yet")
    output = output or Path("front" if pareto else NAMES.get(format_name, "best.toml"))
    if output.is_dir() and not pareto:
        raise InputError(f"-o: {output} is a folder; name a file in it")
    checks = study_checks(opened.info, opened.records)
    for standing, path in chosen(opened, best.standing, output, trial=trial, pareto=pareto):
        if format_name == "python":
            write_recipe(opened, best, standing, path, checks=standing_checks(standing, checks), force=force)
            continue
        toml, script = path, None
        if format_name == "sbatch":
            toml = path.with_suffix(".toml")
            script = path if path != toml else path.with_suffix(".sh")
        exported = export(
            opened.info, opened.name, standing,
            winner=best, output=toml, checks=standing_checks(standing, checks),
        )  # fmt: skip
        write_file(toml, exported.toml, force=force)
        say(f"wrote {toml}: {speed(standing)}")
        for problem in exported.problems:
            say(f"warning: trend check {problem}")
        if script is not None:
            write_script(script, exported, opened, toml, force=force)
        elif format_name == "command":
            print(command_text(exported.command))
        else:
            say(f"run it: {command_text(exported.command)}")
    return 0


def chosen(
    opened: OpenStudy, best: Standing, output: Path, *, trial: int | None, pareto: bool
) -> list[tuple[Standing, Path]]:
    """What to write, and where."""
    from titan_tune.study.selection import pareto_front, standing_of_trial

    if pareto:
        return [(s, output / f"{s.config_id}.toml") for s in pareto_front(opened.records)]
    return [(standing_of_trial(opened.records, trial) if trial is not None else best, output)]


def write_recipe(
    opened: OpenStudy,
    best: Winner,
    standing: Standing,
    path: Path,
    *,
    checks: Sequence[Check],
    force: bool,
) -> None:
    """Write one configuration as a Python recipe; in a Pareto front's folder its name becomes a module's."""
    from titan_tune.export import command_text
    from titan_tune.export_recipe import export_recipe, front_name

    if path.name == f"{standing.config_id}.toml":
        path = path.with_name(front_name(standing.config_id))
    exported = export_recipe(opened.info, opened.name, standing, winner=best, output=path, checks=checks)
    write_file(path, exported.text, force=force)
    say(f"wrote {path}: {speed(standing)}; a recipe for torchtitan 0.3.0, with which nothing was measured")
    for problem in exported.problems:
        say(f"warning: trend check {problem}")
    for line in exported.lost:
        say(f"warning: not carried over: {line}")
    say(f"run it: {command_text(exported.command)}")


def speed(standing: Standing) -> str:
    """Throughput and where it is from."""
    return f"{standing.tokens_per_second:,.0f} tokens/s per GPU ({standing.origin})"


def write_script(path: Path, exported: Export, opened: OpenStudy, toml: Path, *, force: bool) -> None:
    """Write the batch script beside its TOML; the job runs in the current folder, as the search did."""
    import shlex

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
    say(f"submit it: sbatch {shlex.quote(f'./{path}' if str(path).startswith('-') else str(path))}")


def say(text: str) -> None:
    """One line on stderr, as it is."""
    stderr_console().print(text, highlight=False, markup=False, soft_wrap=True)


def write_file(path: Path, text: str, *, force: bool, executable: bool = False) -> None:
    """Write a result; an existing file is only replaced when it is titan-tune's own or ``force`` is set."""
    write_result(path, text, is_own=_is_own, option="-o", force=force, mode=0o755 if executable else 0o644)


def _is_own(head: str) -> bool:
    return head.removeprefix("#!/bin/bash\n").startswith(OWN_FILE)
