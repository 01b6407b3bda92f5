"""Pipeline stages of one rank without the others: torch's own schedules run, messages say nothing.

Stages exchange shapes before the first step; here they are given instead, as torch's static mode
takes them. Everything after that, receive buffers included, is torch's code. Child process only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torchtitan.distributed import ParallelDims

from titan_tune.titan.plugin.dry_run_stages import hidden_state


def stage_class(config: Any, dims: ParallelDims, model_args: Any) -> type:
    """A ``PipelineStage`` that torchtitan can build as its own and that knows its shapes."""
    rows = config.parallelism.pipeline_parallel_microbatch_size
    sequence = config.training.seq_len // dims.cp

    class StaticStage(PipelineStage):  # type: ignore[misc]
        overlapped: frozenset[int] = frozenset()
        """Microbatches whose forward runs beside a backward."""

        def __init__(
            self, submodule: torch.nn.Module, index: int, num_stages: int, device: Any, *, group: Any
        ) -> None:
            hidden = hidden_state(config, dims, model_args.dim)
            tokens = torch.empty(rows, sequence, dtype=torch.int64, device="meta")
            logits = torch.empty(rows, sequence, model_args.vocab_size, dtype=hidden.dtype, device="meta")
            output = logits if index == num_stages - 1 else hidden.detach()
            super().__init__(
                submodule,
                index,
                num_stages,
                device,
                input_args=(tokens if index == 0 else hidden.requires_grad_(),),
                output_args=(output.requires_grad_(),),
                group=group,
            )

        def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
            # as torch 2.11 learns the shapes: once through the stage with zeros, in front of everything
            with torch.no_grad():
                self.submod(tokens_or_hidden(self.is_first))
            return super()._prepare_forward_infra(*args, **kwargs)

        def forward_one_chunk(
            self,
            fwd_chunk_id: int,
            args: tuple[Any, ...],
            kwargs: dict[str, Any] | None = None,
            save_forward_output: bool = True,
        ) -> Any:
            # torchtitan's overlap_callback leaves the default: the last stage keeps these logits all step
            saves = save_forward_output or fwd_chunk_id in self.overlapped
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output=saves)

    def tokens_or_hidden(is_first: bool) -> torch.Tensor:
        if is_first:
            return torch.zeros(rows, sequence, dtype=torch.int64, device="cpu")
        return torch.zeros_like(hidden_state(config, dims, model_args.dim), device="cpu")

    return StaticStage


def install(config: Any, dims: ParallelDims, model_args: Any) -> None:
    """Let torchtitan build static stages, and schedules skip the vote on how to learn shapes."""
    import torchtitan.distributed.pipeline_parallel as titan_pipeline
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV, _PipelineSchedule

    titan_pipeline.PipelineStage = stage_class(config, dims, model_args)
    if config.parallelism.pipeline_parallel_expert_parallel_overlap:
        # torchtitan's callback runs a backward in a second thread, out of reach of fake and dispatch modes: torch
        # runs the two one after the other instead, and the outputs that the callback saves are saved
        config.parallelism.pipeline_parallel_expert_parallel_overlap = False
        build = titan_pipeline.build_pipeline_schedule

        def build_overlapped(*args: Any, **kwargs: Any) -> Any:
            schedule = build(*args, **kwargs)
            if isinstance(schedule, ScheduleDualPipeV):
                _mark_overlapped(schedule)
            return schedule

        titan_pipeline.build_pipeline_schedule = build_overlapped
    if hasattr(_PipelineSchedule, "_warmup_p2p"):  # since torch 2.12
        from torch.distributed.pipelining._utils import InferenceMode

        def no_vote(schedule: Any, stages: list[Any], *args: Any) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        _PipelineSchedule._warmup_p2p = no_vote
        _sum_gradients_as_before()


def _sum_gradients_as_before() -> None:
    """Up to torch 2.11 a weight half works on sums of the gradients that its input half left: ``sum`` of one is a copy
    beside it, of the logits' gradient on the last stage. torch 2.13 uses the gradients themselves."""
    from torch.distributed.pipelining import stage

    original = stage.stage_backward_weight

    def summed(param_groups: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for group in param_groups:
            left = [[g for g in grads if g is not None] for grads in group.get("grads") or ()]
            copies = [sum(grads) for grads in left]
            del left
            yield group
            del copies

    def with_sums(weights: Any, param_groups: Any, **kwargs: Any) -> Any:
        return original(weights, summed(param_groups), **kwargs)

    stage.stage_backward_weight = with_sums


def _mark_overlapped(schedule: Any) -> None:
    """Tell each stage of a schedule which of its forwards are halves of an ``OVERLAP_F_B``."""
    actions = schedule.pipeline_order_with_comms[schedule.rank]
    forwards = [action.sub_actions[0] for action in actions if action.sub_actions]
    for stage in schedule._stages:
        stage.overlapped = frozenset(
            f.microbatch_index for f in forwards if f.stage_index == stage.stage_index
        )
