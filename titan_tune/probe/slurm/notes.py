"""``job.json``: which job is a trial's. Written before it is submitted, and again with its id.

By it a job is found again that outlived its search, also one that was killed between the two.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from titan_tune.probe import files

JOB_FILE: Final = "job.json"


@dataclass(frozen=True, slots=True)
class JobNote:
    """One submission of a trial."""

    name: str
    """Unique: the job is found by it."""
    attempt: int
    job_id: str | None = None
    lane: int = 0
    """Which compile caches it uses: no two jobs of a search use the same at once."""

    def write(self, directory: Path) -> None:
        """Into the trial folder, whole or not at all."""
        files.write_json(directory / JOB_FILE, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> JobNote | None:
        """The note of a trial folder; ``None`` where no job was ever submitted for it."""
        try:
            noted = json.loads((directory / JOB_FILE).read_text(encoding="utf-8"))
            return cls(str(noted["name"]), int(noted["attempt"]), noted["job_id"], int(noted["lane"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def job_label(study: str, directory: Path) -> str:
    """The readable first part of a job's name: ``tt-study-folder``, without a character that Slurm would read."""
    words = (re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:24].strip("_") for text in (study, directory.name))
    return "-".join(["tt", *filter(None, words)])
