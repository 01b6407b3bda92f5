"""Validity rules and known traps of torchtitan 0.2.2, decided from the configuration alone.

``invalid`` rules say what torchtitan would refuse, crash on or hang in; ``warning`` rules say what
would run but not do what its keys promise. Each rule names the key and the value, and its fix.
``docs/rules.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_tune.domain.candidate import Finding, Value
from titan_tune.domain.settings import Settings

# importing a module registers its rules
from titan_tune.titan.rules import compute_traps, layout, parallel_traps, pipeline, precision, training
from titan_tune.titan.rules.registry import REGISTRY, Rule

__all__ = [
    "INVALID_RULES",
    "LAYOUT_RULES",
    "NUMERICS_RULES",
    "OTHER_RULES",
    "RULES",
    "WARNING_RULES",
    "Rule",
    "first_invalid",
    "first_of",
    "invalid",
    "warnings",
]

_MODULES = (layout, pipeline, precision, training, parallel_traps, compute_traps)
"""In the order in which their rules are evaluated."""

RULES: tuple[Rule, ...] = tuple(
    rule for module in _MODULES for rule in REGISTRY.values() if rule.check.__module__ == module.__name__
)
LAYOUT_RULES: tuple[Rule, ...] = tuple(r for r in RULES if r.kind == "invalid" and r.layout)
"""Invalid rules that hold for a layout whatever the rest of the configuration."""
OTHER_RULES: tuple[Rule, ...] = tuple(r for r in RULES if r.kind == "invalid" and not r.layout)
INVALID_RULES: tuple[Rule, ...] = LAYOUT_RULES + OTHER_RULES
WARNING_RULES: tuple[Rule, ...] = tuple(r for r in RULES if r.kind == "warning")
NUMERICS_RULES: tuple[Rule, ...] = tuple(r for r in WARNING_RULES if r.numerics)
"""Warnings of what changes the mathematics of the training, whatever the keys say."""


def invalid(settings: Settings, values: Mapping[str, Value]) -> tuple[Finding, ...]:
    """Every reason why the configuration cannot run.

    ``values`` are all resolved dotted keys, ``settings`` the typed view of the same configuration.
    """
    return _all(INVALID_RULES, settings, values)


def warnings(settings: Settings, values: Mapping[str, Value]) -> tuple[Finding, ...]:
    """Every known trap that the configuration steps into."""
    return _all(WARNING_RULES, settings, values)


def first_invalid(settings: Settings, values: Mapping[str, Value]) -> Finding | None:
    """The first reason why the configuration cannot run; stops there."""
    return first_of(INVALID_RULES, settings, values)


def first_of(rules: Sequence[Rule], settings: Settings, values: Mapping[str, Value]) -> Finding | None:
    """The first finding of ``rules``, in their order."""
    for rule in rules:
        facts = rule.check(settings, values)
        if facts is not None:
            return rule.finding(facts)
    return None


def _all(rules: Sequence[Rule], settings: Settings, values: Mapping[str, Value]) -> tuple[Finding, ...]:
    return tuple(finding for rule in rules if (finding := rule(settings, values)) is not None)
