"""Pipeline stages whose neighbours do not exist: what they would say of shapes is known.

Before the first step each stage receives the metadata of its inputs, and since torch 2.12 of its output
gradients too: objects over the pipeline's group, to which nobody answers here. All of them describe one
microbatch's hidden state. The rest (buffers, the order of work, a first pass through the stage that only
looks at shapes) is torch's own code, so memory is that of a real run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from titan_tune.titan.plugin.dry_run_timer import Timer

IS_ACTIVATION: Final = "_titan_tune_is_activation"
"""Attribute of tensors that go to the next stage: torch 2.13 sends them detached, like gradients."""


def hidden_state(config: Any, dims: Any, width: int) -> torch.Tensor:
    """What one stage sends the next for one microbatch: (microbatch, local sequence, width), on meta."""
    from torchtitan.config import TORCH_DTYPE_MAP

    training, rows = config.training, config.parallelism.pipeline_parallel_microbatch_size
    # FSDP computes in its own dtype; without it a pipeline has no mixed precision (torchtitan 0.2.2)
    dtype = training.mixed_precision_param if dims.fsdp_enabled else training.dtype
    # sequence parallel is always on: hidden states between blocks are sharded over tp too
    sequence = training.seq_len // dims.cp // dims.tp
    return torch.empty(rows, sequence, width, dtype=TORCH_DTYPE_MAP[dtype], device="meta")


def stage_class(hidden: Callable[[], torch.Tensor], timer: Timer) -> type:
    """A ``PipelineStage`` for torchtitan to build; ``hidden`` is called once the model is known.

    ``timer`` gets (stage, kind) of each microbatch: forward F, backward B, or its input I and weight half W.
    """

    class DryRunStage(PipelineStage):  # type: ignore[misc]
        # torch <= 2.11
        def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
            with _answered_objects(lambda: (hidden(),)):
                return super()._shape_inference(*args, **kwargs)

        # torch >= 2.12
        def _recv_meta(self, src_stage: int) -> Any:
            return _metadata(hidden(), forward=src_stage < self.stage_index)

        def _send_meta(self, meta: Any, dst_stage: int) -> None:
            """To nobody."""

        def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
            operations = super().get_fwd_send_ops(fwd_chunk_id)
            for operation in operations:
                setattr(operation.tensor, IS_ACTIVATION, True)
            return operations

        def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with timer.time((self.stage_index, "F")):
                return super().forward_one_chunk(*args, **kwargs)

        def backward_one_chunk(
            self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> Any:
            with timer.time((self.stage_index, "B" if full_backward else "I")):
                return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

        def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with timer.time((self.stage_index, "W")):
                return super().backward_weight_one_chunk(*args, **kwargs)

    return DryRunStage


def _metadata(hidden: torch.Tensor, *, forward: bool) -> Any:
    """What a neighbour would say: of its outputs, or of the gradients of its inputs."""
    from torch.distributed.pipelining import _utils

    if forward:
        return _utils._StageForwardMeta((_utils._TensorMeta.from_tensor(hidden.requires_grad_()),))
    return _utils._StageBackwardMeta((_utils._TensorMeta.from_tensor(hidden),))


@contextmanager
def _answered_objects(answer: Callable[[], Any]) -> Any:
    """``recv_object_list`` gives ``answer()``, ``send_object_list`` sends nothing."""
    receive, send = dist.recv_object_list, dist.send_object_list

    def answered(objects: list[Any], *args: Any, **kwargs: Any) -> None:
        objects[0] = answer()

    dist.recv_object_list, dist.send_object_list = answered, lambda *args, **kwargs: None
    try:
        yield
    finally:
        dist.recv_object_list, dist.send_object_list = receive, send
