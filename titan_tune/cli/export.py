"""``titan-tune export``."""

from __future__ import annotations

from pathlib import Path

from titan_tune.cli.console import stderr_console
from titan_tune.errors import InputError, ProbesFailedError
from titan_tune.probe.record import write_whole

FORMATS = ("toml", "command")


def run_export(
    study: str,
    *,
    output: Path,
    trial: int | None,
    pareto: bool,
    format_name: str,
    storage: str | None,
    runs_dir: Path,
    force: bool,
) -> int:
    """Write the chosen configuration(s); returns the exit code."""
    from titan_tune.export import command_text, export
    from titan_tune.study.open import open_study
    from titan_tune.study.selection import pareto_front, standing_of_trial, winner

    if format_name not in FORMATS:
        raise InputError(f"--format: {format_name!r} is not one of: {', '.join(FORMATS)}")
    if trial is not None and pareto:
        raise InputError("--trial and --pareto exclude each other")
    opened = open_study(study, storage=storage, runs_dir=runs_dir)
    best = winner(opened.records)
    if best is None:
        raise ProbesFailedError(f"study {opened.name!r} has no measured configuration yet")
    console = stderr_console()
    if pareto:
        chosen = [(s, output / f"{s.config_id}.toml") for s in pareto_front(opened.records)]
    elif trial is not None:
        chosen = [(standing_of_trial(opened.records, trial), output)]
    else:
        chosen = [(best.standing, output)]
    for standing, path in chosen:
        exported = export(opened.info, opened.name, standing, winner=best, output=path)
        if format_name == "command":
            print(command_text(exported.command))
            continue
        write_file(path, exported.toml, force=force)
        console.print(
            f"wrote {path}: {standing.tokens_per_second:,.0f} tokens/s per GPU",
            highlight=False,
            soft_wrap=True,
        )
        console.print(f"run it: {command_text(exported.command)}", highlight=False, soft_wrap=True)
    return 0


def write_file(path: Path, text: str, *, force: bool) -> None:
    """Write a result; an existing file is only replaced when it is titan-tune's own or ``force`` is set."""
    if path.is_dir():
        raise InputError(f"-o: {path} is a folder; name a file in it")
    if (
        path.exists()
        and not force
        and not path.read_text(encoding="utf-8", errors="replace").startswith("# titan-tune ")
    ):
        raise InputError(f"-o: {path} exists and was not written by titan-tune; --force replaces it")
    write_whole(path, text)
    path.chmod(0o644)
