"""``titan-tune report``."""

from __future__ import annotations

import dataclasses
import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_tune.cli.console import stderr_console, stdout_console
from titan_tune.cli.studies import opened_study
from titan_tune.errors import InputError
from titan_tune.probe.record import write_whole

if TYPE_CHECKING:
    from titan_tune.report.data import ReportData

DEFAULT_RUNS = Path("runs")
HEAD_CHARACTERS = 2000
"""How far into an existing file the mark of an earlier report is looked for."""


def run_report(study: str, *, output: Path, storage: str | None, runs_dir: Path, as_json: bool) -> int:
    """Write ``<output>/<study>.html`` and ``.md`` and print the summary; returns the exit code.

    Raises:
        InputError: no such study, or a file in the way that is not a report.
        StorageError: the study's storage cannot be read.
    """
    from titan_tune.report.data import report_data
    from titan_tune.report.html import GENERATOR, render_html
    from titan_tune.report.markdown import MARKER, render_markdown
    from titan_tune.report.search import summary
    from titan_tune.study.numerics import winner_effects

    opened = opened_study(study, storage=storage, runs_dir=runs_dir)
    data = report_data(
        opened.name,
        opened.info,
        opened.records,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        export_command=export_command(study, storage=storage, runs_dir=runs_dir),
    )
    page, text = output / f"{opened.name}.html", output / f"{opened.name}.md"
    _check_replaceable(output, {page: GENERATOR, text: MARKER})
    for path, content in ((page, render_html(data)), (text, render_markdown(data))):
        write_whole(path, content)
        path.chmod(0o644)
    notes = stderr_console()
    view = summary(
        opened.records,
        numerics_axes=opened.info.numerics_axes,
        layout_effects=winner_effects(opened.info.base(), opened.info.cluster, opened.records),
        world_size=opened.info.cluster.world_size,
    )
    (notes if as_json else stdout_console()).print(view)
    if as_json:
        print(json.dumps(report_json(data, files=(page, text)), indent=1))
    for path in (page, text):
        notes.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def export_command(study: str, *, storage: str | None, runs_dir: Path) -> str:
    """The shell line that exports the winner; a password in the storage URL is left out."""
    words = ["titan-tune", "export", study, "-o", "best.toml"]
    if storage is not None:
        from titan_tune.study.storage import public_url

        words += ["--storage", public_url(storage)]
    if runs_dir != DEFAULT_RUNS and "/" not in study:
        words += ["--runs-dir", str(runs_dir)]
    return shlex.join(words)


def report_json(data: ReportData, *, files: tuple[Path, ...]) -> dict[str, Any]:
    """The report's data as ``--json`` prints it."""
    from titan_tune.report.data import SCHEMA

    plain = dataclasses.asdict(data)
    plain["method"]["probe"] = data.method.probe.model_dump()
    return {"schema": SCHEMA, "files": [str(path) for path in files], **plain}


def _check_replaceable(output: Path, files: dict[Path, str]) -> None:
    if output.exists() and not output.is_dir():
        raise InputError(f"-o: {output} is a file; name a folder")
    for path, mark in files.items():
        if path.is_dir():
            raise InputError(f"-o: {path} is a folder")
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                head = file.read(HEAD_CHARACTERS)
            if mark not in head:
                raise InputError(f"-o: {path} exists and is not a titan-tune report; choose another folder")
