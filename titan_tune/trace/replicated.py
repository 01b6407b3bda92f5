"""DistributedDataParallel's memory without its reducer, which is C++ and wants real gradients.

``replicate`` is replaced: buckets are allocated as the reducer does (``gradient_as_bucket_view`` is off,
so they are a second copy of the gradients). torch.compile splits a compiled block at DDP's buckets only
where the block is larger than one and not checkpointed; that is not traced. Child process only.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

import torch

from titan_tune.trace.recorder import Recorder

FIRST_BUCKET_BYTES: Final = 1 << 20
"""torch.distributed._DEFAULT_FIRST_BUCKET_BYTES."""
BUCKET_OPERATOR: Final = "ddp_bucket"


def bucket_sizes(gradients: Sequence[int], cap: int) -> list[int]:
    """Bytes of the buckets that gradients of so many bytes fill, in the order in which they get ready."""
    sizes, current, limit = [], 0, min(FIRST_BUCKET_BYTES, cap)
    for num_bytes in gradients:
        current += num_bytes
        if current >= limit:
            sizes.append(current)
            current, limit = 0, cap
    return [*sizes, current] if current else sizes


class Reducer:
    """Buckets of one replicated module."""

    def __init__(self, module: torch.nn.Module, recorder: Recorder, bucket_cap_mb: int) -> None:
        self.bucket_bytes_cap = bucket_cap_mb << 20
        self._module = module
        self._recorder = recorder
        self._forwards = 0
        self._ready: list[int] = []
        self._blocks: list[int] = []

    def before_forward(self, *args: Any) -> None:
        """One bucket for everything at first, proper ones once the order of gradients is known."""
        self._forwards += 1
        if self._forwards == 1:
            parameters = [p for p in self._module.parameters() if p.requires_grad]
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
            self._allocate([sum(p.nbytes for p in parameters)])
        elif self._forwards == 2:
            for block in self._blocks:
                self._recorder.release(block)
            self._allocate(bucket_sizes(self._ready, self.bucket_bytes_cap))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._forwards == 1:
            self._ready.append(parameter.nbytes)

    def _allocate(self, sizes: Sequence[int]) -> None:
        self._blocks = [self._recorder.block(size, BUCKET_OPERATOR) for size in sizes]


def install(recorder: Recorder) -> None:
    """Replace ``replicate`` before torchtitan's models import it."""
    # the package of the same name holds the function, which hides the module
    module: Any = importlib.import_module("torch.distributed._composable.replicate")

    def replicate(model: torch.nn.Module, *, bucket_cap_mb: int = 25, **kwargs: Any) -> torch.nn.Module:
        reducer = Reducer(model, recorder, bucket_cap_mb)
        model.register_forward_pre_hook(reducer.before_forward)
        return model

    module.replicate = replicate
