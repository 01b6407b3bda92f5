"""Which component of the memory breakdown a recorded storage belongs to. Child process only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from titan_tune.trace.recorder import Origin, Recorder
from titan_tune.trace.replicated import BUCKET_OPERATOR

_FORWARD = ("forward", "loss_forward")
_BACKWARD = ("loss_backward", "backward", "embedding_backward")


@dataclass
class Classifier:
    """Sets of block numbers and shapes, read off the trainer once the traced steps are over."""

    parameters: set[int]
    gradients: set[int]
    optimizer: set[int]
    vocabulary: frozenset[int]
    """Widths of a logits tensor on this rank."""
    sequence: int
    score_matrices: int
    """Attention score matrices of one microbatch on this rank: sequences times heads."""
    weight_shapes: frozenset[tuple[int, ...]]
    """Shapes of the parameters on this rank before data parallelism shards them."""
    gather_streams: set[int] = field(default_factory=set)
    reduce_streams: set[int] = field(default_factory=set)

    def __call__(self, block: int, origin: Origin) -> str:
        """The component of one storage."""
        for name in ("parameters", "gradients", "optimizer"):
            if block in getattr(self, name):
                return name
        if origin.stream in self.gather_streams or origin.operator == "resize_":
            return "gathered_parameters"
        if origin.stream in self.reduce_streams or origin.operator == BUCKET_OPERATOR:
            return "gradients"
        return self._by_origin(origin)

    def _by_origin(self, origin: Origin) -> str:
        shape, phase = origin.shape, origin.phase.partition(".")[0]
        if shape in self.weight_shapes and len(shape) > 1:
            if phase in _FORWARD or "_to_copy" in origin.operator:
                return "gathered_parameters"
            if phase in _BACKWARD:
                return "gradients"
        if shape[-2:] == (self.sequence,) * 2 and math.prod(shape[:-2]) == self.score_matrices:
            return "attention_scores"
        if phase in _FORWARD + _BACKWARD:
            if len(shape) > 1 and shape[-1] in self.vocabulary:
                return "logits_loss"
            if not origin.operator.startswith(("cublas", "embedding_scratch")):
                return "activations"
        return "other"


def classifier(trainer: Any, recorder: Recorder) -> Classifier:
    """The classifier of a trainer that has run its steps."""
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    state = [
        value
        for optimizer in trainer.optimizers.optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    args, dims, config = trainer.model_args, trainer.parallel_dims, trainer.job_config
    parallelism = config.parallelism
    rows = (
        parallelism.pipeline_parallel_microbatch_size if dims.pp_enabled else config.training.local_batch_size
    )
    sequence = config.training.seq_len // dims.cp
    made = Classifier(
        parameters=recorder.blocks_of(parameters),
        gradients=trainer.gradient_blocks,
        optimizer=recorder.blocks_of(state),
        vocabulary=frozenset({args.vocab_size, -(-args.vocab_size // dims.tp)}),
        sequence=sequence,
        score_matrices=rows * args.n_heads // dims.tp,
        weight_shapes=frozenset(_local_shape(p) for p in parameters),
    )
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                _add_fsdp(module._get_fsdp_state(), made)
    # a hidden state of (tokens, width) may look like a weight; weights of so many rows then count with it
    made.weight_shapes = frozenset(shape for shape in made.weight_shapes if shape[0] != rows * sequence)
    return made


def _local_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "_local_tensor", parameter).shape)


def _add_fsdp(state: Any, made: Classifier) -> None:
    comm = state._comm_ctx
    made.gather_streams |= {comm.all_gather_copy_in_stream.number, comm.all_gather_stream.number}
    made.reduce_streams |= {comm.reduce_scatter_stream.number, comm.all_reduce_stream.number}
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    made.weight_shapes |= {
        tuple(parameter._orig_size)
        for group in groups
        if group is not None
        for parameter in group.fsdp_params
    }
