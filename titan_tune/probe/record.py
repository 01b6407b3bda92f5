"""Outcomes as JSON, and files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from titan_tune.domain.probe import ProbeOutcome

OUTCOME_FILE = "outcome.json"

_OUTCOME: TypeAdapter[ProbeOutcome] = TypeAdapter(ProbeOutcome)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` never holds a part of it, also after a power loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def outcome_to_dict(outcome: ProbeOutcome) -> dict[str, Any]:
    """Plain JSON data; a loss that is not finite is its name, because JSON has no such number."""
    data = cast(dict[str, Any], _OUTCOME.dump_python(outcome, mode="json"))
    if outcome.measurement is not None:
        losses = outcome.measurement.losses
        data["measurement"]["losses"] = [x if math.isfinite(x) else str(x) for x in losses]
    return data


def outcome_from_dict(data: Any) -> ProbeOutcome:
    """The outcome of :func:`outcome_to_dict`; raises ``ValueError`` for anything else."""
    return _OUTCOME.validate_python(data)


def write_outcome(directory: Path, outcome: ProbeOutcome) -> None:
    """Write ``outcome.json`` into the trial folder."""
    write_whole(directory / OUTCOME_FILE, json.dumps(outcome_to_dict(outcome), indent=1) + "\n")


def read_outcome(directory: Path) -> ProbeOutcome | None:
    """The outcome a trial folder holds; ``None`` when there is none or it is not one."""
    try:
        return outcome_from_dict(json.loads((directory / OUTCOME_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None
