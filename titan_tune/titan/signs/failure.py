"""A kind of failure: the text that its exceptions have, what it means, and the fix."""

from __future__ import annotations

import re
from dataclasses import dataclass

from titan_tune.titan.tracebacks import RaisedError


@dataclass(frozen=True, slots=True)
class Failure:
    """One kind of failure. ``message`` and ``fix`` are templates over the named groups of ``pattern``."""

    rule: str
    pattern: re.Pattern[str]
    message: str
    fix: str
    frame: str = ""
    """What ``file:function`` of a frame must contain, where the text alone says too little."""
    is_fallout: bool = False
    """The usual consequence of another rank's failure: a cause only where there is no other."""

    def match(self, error: RaisedError) -> re.Match[str] | None:
        """Where ``error`` is of this kind."""
        found = self.pattern.search(error.text)
        if found is None or not self.frame:
            return found
        return found if any(self.frame in f"{f.file}:{f.function}" for f in error.all_frames) else None


def failure(
    rule: str, pattern: str, message: str, fix: str, *, frame: str = "", is_fallout: bool = False
) -> Failure:
    """A row of a table."""
    return Failure(rule, re.compile(pattern, re.MULTILINE), message, fix, frame, is_fallout)
