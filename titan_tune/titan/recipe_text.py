"""Parts of a Python recipe: nothing but names that are known and reprs of values becomes code."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titan_tune.catalog.typed import printable
from titan_tune.domain.candidate import Value


@dataclass
class Recipe:
    """A config function in parts."""

    function: str
    title: str
    imports: dict[str, set[str]] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)
    """Statements and comments, not indented."""
    differences: list[str] = field(default_factory=list)
    """What torchtitan 0.3.0 does otherwise with this job."""
    lost: list[str] = field(default_factory=list)
    """What of the job it cannot do."""

    def use(self, module: str, *names: str) -> None:
        """Import names."""
        self.imports.setdefault(module, set()).update(names)


def literal(value: Value) -> str:
    """A value of a job as Python source."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def remark(code: str, text: str) -> str:
    """A statement with a comment."""
    return f"{code}  # {printable(text)}" if text else code
