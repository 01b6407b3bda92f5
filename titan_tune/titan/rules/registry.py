"""What a rule is, and the decorators that register one.

A check is a small function of ``(settings, values)`` that returns ``None`` (nothing to say) or the
facts that the rule's message and fix are written with. It decides quickly and formats nothing: a
search calls every check for every candidate, and nearly all of them have nothing to say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titan_tune.domain.candidate import Finding, Value
from titan_tune.domain.settings import Settings

Facts = Mapping[str, Any]
Check = Callable[[Settings, Mapping[str, Value]], Facts | None]
Kind = Literal["invalid", "warning"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``message`` and ``fix`` are templates over the facts that ``check`` returns.

    ``layout`` rules read only the model, the cluster, ``parallelism.*``, ``training.seq_len`` and the
    batch sizes, so a search evaluates them once per layout and not once per candidate.
    """

    id: str
    kind: Kind
    message: str
    fix: str
    check: Check
    layout: bool
    numerics: bool = False
    """Whether what it warns of changes the mathematics of the training."""

    @property
    def source(self) -> str:
        """Where the rule comes from: the check's docstring."""
        return inspect.getdoc(self.check) or ""

    def __call__(self, settings: Settings, values: Mapping[str, Value]) -> Finding | None:
        """What the rule says about one configuration, if anything."""
        facts = self.check(settings, values)
        return None if facts is None else self.finding(facts)

    def finding(self, facts: Facts) -> Finding:
        """The finding for the facts that ``check`` returned."""
        return Finding(self.id, self.message.format_map(facts), self.fix.format_map(facts))


REGISTRY: dict[str, Rule] = {}
"""Every registered rule by id."""


def invalid(rule_id: str, message: str, *, fix: str, layout: bool = False) -> Callable[[Check], Rule]:
    """Register a check whose finding means that torchtitan would refuse, crash or hang."""
    return _registering("invalid", rule_id, message, fix, layout)


def warning(rule_id: str, message: str, *, fix: str, numerics: bool = False) -> Callable[[Check], Rule]:
    """Register a check whose finding means that the job runs, but not as one would expect."""
    return _registering("warning", rule_id, message, fix, layout=False, numerics=numerics)


def _registering(
    kind: Kind, rule_id: str, message: str, fix: str, layout: bool, numerics: bool = False
) -> Callable[[Check], Rule]:
    def register(check: Check) -> Rule:
        if rule_id in REGISTRY:
            raise ValueError(f"two rules are called {rule_id!r}")
        REGISTRY[rule_id] = rule = Rule(rule_id, kind, message, fix, check, layout, numerics)
        return rule

    return register
