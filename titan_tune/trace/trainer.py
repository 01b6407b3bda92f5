"""torchtitan's trainer without data, checkpoints and metrics: the parts whose memory is traced.

``Trainer.forward_backward_step`` itself runs; building follows ``Trainer.__init__`` in order.
Runs in the child process only.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.tools import utils
from torchtitan.train import Trainer

from titan_tune.trace.events import STEP_PHASE
from titan_tune.trace.phases import watch, watched_loss
from titan_tune.trace.recorder import Recorder

TRACED_STEPS = 2
"""The first step makes the optimizer's state, the second is the steady state."""


class EosTokenizer:
    """What attention masks ask of a tokenizer."""

    eos_id = 0


class TracedTrainer(Trainer):  # type: ignore[misc]
    """One rank's trainer on fake tensors."""

    def __init__(
        self, config: Any, spec: Any, model_args: Any, dims: ParallelDims, recorder: Recorder
    ) -> None:
        self.job_config = config
        self.train_spec = spec
        self.model_args = model_args
        self.recorder = recorder
        self.tokenizer = EosTokenizer()
        self.device = torch.device("cpu")
        self.step = 1
        self.parallel_dims = dims
        self.gradient_accumulation_steps = _accumulation_steps(config, dims)
        self.loss_fn = watched_loss(spec.build_loss_fn(config, parallel_dims=dims), recorder)
        loss_parallel = dims.tp_enabled and not config.parallelism.disable_loss_parallel
        self.train_context = dist_utils.get_train_context(loss_parallel)
        self.maybe_enable_amp = dist_utils.maybe_enable_amp(
            dims, config.training.mixed_precision_param, "cpu"
        )

    def build(self) -> None:
        """The model on meta, converted, split and parallelised; outside fake mode, as it runs for real."""
        config, dims, spec = self.job_config, self.parallel_dims, self.train_spec
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
            model = spec.model_cls(self.model_args)
        _untie(model)
        self.converters = build_model_converters(config, dims)
        self.converters.convert(model)
        if dims.pp_enabled:
            self._split(model)
        else:
            self.model_parts = [spec.parallelize_fn(model, dims, config)]
        for part in self.model_parts:
            watch(part, self.recorder)

    def materialize(self) -> None:
        """Storage for parameters and buffers, and the optimizers; under fake mode."""
        with self.recorder:
            for part in self.model_parts:
                _materialize(part, self.recorder)
                _tie(part)
                part.train()
        self.optimizers = self.train_spec.build_optimizers_fn(
            self.model_parts, self.job_config.optimizer, self.parallel_dims
        )
        self.optimizers.register_step_post_hook(
            lambda *args, **kwargs: self.converters.post_optimizer_hook(self.model_parts)
        )

    def _split(self, model: torch.nn.Module) -> None:
        if not self.train_spec.pipelining_fn:
            raise RuntimeError(
                f"Pipeline Parallel is enabled but {self.job_config.model.name} does not support pipelining"
            )
        self.pp_schedule, self.model_parts, self.pp_has_first_stage, self.pp_has_last_stage = (
            self.train_spec.pipelining_fn(
                model,
                self.parallel_dims,
                self.job_config,
                self.device,
                self.model_args,
                self.train_spec.parallelize_fn,
                self.loss_fn,
            )
        )

    @property
    def stages(self) -> tuple[int, ...]:
        """Indices of the pipeline stages on this rank."""
        if not self.parallel_dims.pp_enabled:
            return (0,)
        schedule = self.pp_schedule
        stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
        return tuple(stage.stage_index for stage in stages)

    def run(self) -> None:
        """Trace the steps. ``gradient_blocks`` are the gradients as they stand before the last update."""
        gc.collect()
        gc.disable()
        with self.recorder:
            valid_tokens = torch.ones((), device=self.device)
            for _ in range(TRACED_STEPS):
                self._traced_step(valid_tokens)

    def _traced_step(self, valid_tokens: torch.Tensor) -> None:
        mark, training = self.recorder.mark, self.job_config.training
        mark(STEP_PHASE)
        self.optimizers.zero_grad()
        shape = (training.local_batch_size, training.seq_len)
        losses = []
        for _ in range(self.gradient_accumulation_steps):
            inputs = torch.empty(shape, dtype=torch.int64, device=self.device)
            labels = torch.empty(shape, dtype=torch.int64, device=self.device)
            mark("forward")
            loss = self.forward_backward_step(
                input_dict={"input": inputs}, labels=labels, global_valid_tokens=valid_tokens
            )
            losses.append(loss.detach())
        mark("clip_gradients")
        parameters = [p for part in self.model_parts for p in part.parameters()]
        dist_utils.clip_grad_norm_(
            parameters,
            training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        self.gradient_blocks = self.recorder.blocks_of(p.grad for p in parameters)
        mark("optimizer")
        self.optimizers.step()
        mark("step_end")


def parallel_dims(config: Any) -> ParallelDims:
    """torchtitan's parallel degrees with their meshes; outside fake mode."""
    p = config.parallelism
    dims = ParallelDims(
        dp_shard=p.data_parallel_shard_degree,
        dp_replicate=p.data_parallel_replicate_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
        etp=p.expert_tensor_parallel_degree,
        world_size=torch.distributed.get_world_size(),
    )
    dims.build_mesh()
    return dims


def _accumulation_steps(config: Any, dims: ParallelDims) -> int:
    degree = dims.dp_replicate * dims.dp_shard
    local, global_ = config.training.local_batch_size, config.training.global_batch_size
    if global_ < 0:
        global_ = local * degree
    if global_ <= 0 or global_ % (local * degree):
        raise ValueError(
            f"global batch size must be multiple of local batch size times data-parallel degree "
            f"({global_} % ({local} * {degree}) != 0)"
        )
    return int(global_ // (local * degree))


def _untie(model: torch.nn.Module) -> None:
    """Two parameters where embedding and output share one: what parallelism and ``to_empty`` make of it before
    ``init_weights`` ties them again (torch 2.13 refuses to shard a shared one)."""
    if getattr(model, "enable_weight_tying", False):
        output: Any = model.output
        output.weight = torch.nn.Parameter(torch.empty_like(output.weight))


def _tie(part: torch.nn.Module) -> None:
    """As ``init_weights`` does."""
    if getattr(part, "enable_weight_tying", False):
        embedding: Any = part.tok_embeddings
        output: Any = part.output
        output.weight = embedding.weight


def _materialize(part: torch.nn.Module, recorder: Recorder) -> None:
    """Meta parameters and buffers → fake storage on the device (``to_empty`` swaps data, which fakes refuse)."""
    made: dict[int, torch.Tensor] = {}
    for module in part.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter.detach(), device="cpu")
                    made[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    recorder.track(made[id(parameter)], "parameter")
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
                recorder.track(module._buffers[name], "buffer")
