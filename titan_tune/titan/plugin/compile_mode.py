"""``titan_tune.compile_mode``: ``torch.compile``'s mode for torchtitan, which has no key for it."""

from __future__ import annotations

import functools
from typing import Any

import torch

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def use_mode(mode: str) -> None:
    """Give ``mode`` to every ``torch.compile`` call that names neither a mode nor options.

    Writing Inductor's global configuration instead would not reach all compilations: in torch 2.13
    an override is a context variable, which the autograd thread does not see.
    """
    if mode == "default":
        return
    original = torch.compile

    @functools.wraps(original)
    def compile_with_mode(*args: Any, **kwargs: Any) -> Any:
        uses_inductor = kwargs.get("backend", "inductor") == "inductor"
        if uses_inductor and kwargs.get("mode") is None and kwargs.get("options") is None:
            kwargs["mode"] = mode
        return original(*args, **kwargs)

    torch.compile = compile_with_mode


def mark_cuda_graph_steps(trainer_class: Any) -> None:
    """Begin a CUDA-graph iteration at each microbatch, and keep gradients out of the graphs' memory.

    Without the mark, a graph's outputs could be overwritten while still in use. The mark frees what the
    previous microbatch left in the graphs' pool, where unsharded gradients live: those that a later
    microbatch adds to are moved out first (once a step; the additions after that are in place).
    """
    original = trainer_class.forward_backward_step

    @functools.wraps(original)
    def forward_backward_step(trainer: Any, **kwargs: Any) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        is_first = not any(p.grad is not None for m in trainer.model_parts for p in m.parameters())
        loss = original(trainer, **kwargs)
        if is_first and trainer.gradient_accumulation_steps > 1:
            for part in trainer.model_parts:
                for parameter in part.parameters():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.clone()
        return loss

    trainer_class.forward_backward_step = forward_backward_step
