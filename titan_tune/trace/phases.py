"""Hooks on torchtitan's model that tell the recorder which phase of the step begins. Child process only."""

from __future__ import annotations

from typing import Any

import torch

from titan_tune.trace.recorder import Recorder


def watch(part: torch.nn.Module, recorder: Recorder) -> None:
    """Mark forward, loss and backward phases of one model part."""
    part.register_forward_pre_hook(lambda module, args: recorder.mark("forward"))
    last = getattr(part, "norm", None)
    if last is not None:
        last.register_forward_pre_hook(lambda module, args: _entering_tail(args, recorder))
    for name, layer in part.layers.named_children():
        layer.register_forward_hook(_block_hook(recorder, name))
    first = getattr(part, "tok_embeddings", None)
    if first is not None:
        first.register_forward_hook(
            lambda module, args, output: _on_gradient(output, recorder, "embedding_backward")
        )


def _entering_tail(args: tuple[Any, ...], recorder: Recorder) -> None:
    recorder.mark("loss_forward")


def _block_hook(recorder: Recorder, layer: str) -> Any:
    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        _on_gradient(output, recorder, f"backward.{layer}")

    return hook


def _on_gradient(tensor: torch.Tensor, recorder: Recorder, phase: str) -> None:
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: recorder.mark(phase))


def watched_loss(loss_fn: Any, recorder: Recorder) -> Any:
    """The loss function; its backward begins the phase ``loss_backward``."""

    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        recorder.mark("loss_forward")
        loss: torch.Tensor = loss_fn(*args, **kwargs)
        _on_gradient(loss, recorder, "loss_backward")
        return loss

    return wrapper
