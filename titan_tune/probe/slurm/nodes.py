"""Which nodes to keep away from: those that failed more than once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

FAILURES: Final = 2
"""Infrastructure failures after which a node is excluded from the rest of the search."""


@dataclass(slots=True)
class NodeLedger:
    """Failures by node."""

    failures: Counter[str] = field(default_factory=Counter)

    def blame(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Count a failure of each; those that have reached ``FAILURES`` by it."""
        reached = []
        for node in nodes:
            self.failures[node] += 1
            if self.failures[node] == FAILURES:
                reached.append(node)
        return tuple(reached)

    @property
    def bad(self) -> tuple[str, ...]:
        """Nodes with ``FAILURES`` or more, the worst first."""
        return tuple(node for node, count in self.failures.most_common() if count >= FAILURES)

    def excluded(self, avoid: Iterable[str], *, available: Sequence[str], needed: int) -> tuple[str, ...]:
        """The bad nodes, then those to ``avoid`` for once, as long as ``needed`` of the ``available`` remain.

        A job that excludes too many nodes would wait for ever.
        """
        wanted = [node for node in dict.fromkeys([*self.bad, *avoid]) if node in available]
        return tuple(wanted[: max(0, len(available) - needed)])
