"""The base of the validated, frozen models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A pydantic model that cannot change after birth and accepts no unknown field."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
