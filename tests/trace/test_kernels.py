"""Memory that CUDA kernels allocate inside themselves, from the operators and shapes that a trace sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from titan_tune.trace.events import Free, Mark  # noqa: E402
from titan_tune.trace.kernels import InnerAllocations  # noqa: E402
from titan_tune.trace.recorder import Recorder  # noqa: E402

BATCH, HEADS, SEQ, HEAD_DIM = 2, 4, 64, 48


def allocated(operator: str, *args: Any) -> list[int]:
    """Bytes that one operator allocated; all of it must be gone again."""
    recorder = Recorder()
    InnerAllocations(recorder)(SimpleNamespace(name=lambda: operator), args)
    births = [event for event in recorder.log if not isinstance(event, Free | Mark)]
    freed = {event.block for event in recorder.log if isinstance(event, Free)}
    assert freed == {birth.block for birth in births}
    return [birth.num_bytes for birth in births]


def meta(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_backward_sums_the_querys_gradient_in_fp32(is_causal: bool) -> None:
    half = meta(BATCH, HEADS, SEQ, HEAD_DIM, dtype=torch.bfloat16)
    before_causal = [None] * 7  # seeds, bias, sequence lengths
    args = (half, half, half, half, half, meta(BATCH, HEADS, SEQ, 1), *before_causal, 0.0, is_causal)
    # aten::_scaled_dot_product_cudnn_attention_backward(grad_out, q, k, v, out, lse, seed, offset, bias,
    # cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default._schema
    assert [argument.name for argument in schema.arguments].index("is_causal") == len(args) - 1
    found = allocated("aten::_scaled_dot_product_cudnn_attention_backward", *args)
    rows = BATCH * HEADS * SEQ
    assert found == ([4 * rows * (HEAD_DIM + 1)] if is_causal else [])


def test_softmax_backward_multiplies_first() -> None:
    scores = meta(BATCH, HEADS, SEQ, SEQ)
    assert allocated("aten::_softmax_backward_data", scores, scores, -1, torch.float32) == [scores.nbytes]


def test_safe_softmax_holds_the_plain_one_and_a_mask() -> None:
    scores = meta(BATCH, HEADS, SEQ, SEQ)
    assert allocated("aten::_safe_softmax", scores, -1) == [scores.nbytes, scores.numel()]


def test_other_operators_allocate_nothing() -> None:
    assert allocated("aten::add.Tensor", meta(4), meta(4)) == []
