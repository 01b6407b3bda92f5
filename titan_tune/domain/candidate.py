"""A candidate: one configuration of a search, and what is said against one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from titan_tune.domain.settings import Settings

Value = Any
"""What TOML can hold: bool, int, float, str, list, None for "unset"."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a rule says about a configuration: a rejection or a warning."""

    rule: str
    message: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as ``estimate --json`` prints it."""
        return {"rule": self.rule, "message": self.message, "fix": self.fix}


@dataclass(frozen=True)
class Candidate:
    """One point of a search space.

    ``choices`` maps axis name to label, in axis order. ``values`` are the torchtitan keys that differ
    from the base job (dotted, canonical: no-ops collapsed), plus ``titan_tune.*`` keys.
    ``identity`` is what makes two candidates the same run (see ``titan.canonical``).
    """

    choices: Mapping[str, str]
    values: Mapping[str, Value]
    settings: Settings
    identity: str = field(repr=False)

    @cached_property
    def config_id(self) -> str:
        """Twelve hex digits of the hash of ``identity``; equal configurations share it."""
        return config_id_of(self.identity)


def config_id_of(identity: str) -> str:
    """Twelve hex digits of the hash of an identity."""
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def identity_of(values: Value) -> str:
    """Canonical JSON of resolved keys (or of one value): sorted, no spaces."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
