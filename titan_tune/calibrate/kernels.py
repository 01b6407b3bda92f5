"""What a calibration times on one device: the kernels of a training step, alone. Imports torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_tune.calibrate.plan import AttentionTask, CopyTask, MatmulTask, Task

Step = Callable[[], object]

ATTENTION_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""torchtitan 0.2.2's order (models/attention.py)."""
WARM_UP_CALLS = 3
SMALLEST_BATCH_SECONDS = 0.005
MOST_BATCHES = 15
LAUNCHES = 2000


def steps(task: Task, device: torch.device) -> Mapping[str, Step]:
    """What to time for a task, by the name of the figure."""
    if isinstance(task, CopyTask):
        source = torch.zeros(task.bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return {"seconds": lambda: target.copy_(source)}
    if isinstance(task, AttentionTask):
        return _attention(task, device)
    if isinstance(task, MatmulTask):
        return _float8(task, device) if task.kind.startswith("float8") else _linear(task, device)
    raise NotImplementedError(type(task).__name__)


def _linear(task: MatmulTask, device: torch.device) -> Mapping[str, Step]:
    dtype = torch.bfloat16 if task.kind == "bfloat16" else torch.float32
    x = torch.randn(task.tokens, task.inputs, device=device, dtype=dtype)
    weight = torch.randn(task.outputs, task.inputs, device=device, dtype=dtype)
    gradient = torch.randn(task.tokens, task.outputs, device=device, dtype=dtype)
    return {
        "forward_seconds": lambda: x @ weight.t(),
        "backward_seconds": lambda: (gradient @ weight, gradient.t() @ x),
    }


def _float8(task: MatmulTask, device: torch.device) -> Mapping[str, Step]:
    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn)

    x, weight = random(task.tokens, task.inputs), random(task.outputs, task.inputs).t()
    is_rowwise = task.kind == "float8_rowwise"
    x_scale = torch.ones((task.tokens, 1) if is_rowwise else (), device=device)
    weight_scale = torch.ones((1, task.outputs) if is_rowwise else (), device=device)

    def multiply() -> object:
        return torch._scaled_mm(
            x, weight, scale_a=x_scale, scale_b=weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return {"forward_seconds": multiply}


def _attention(task: AttentionTask, device: torch.device) -> Mapping[str, Step]:
    shape = (task.batch, task.heads, task.sequence, task.head_dim)
    query, key, value = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )

    def forward() -> torch.Tensor:
        if device.type == "cpu":
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        with sdpa_kernel(ATTENTION_BACKENDS, set_priority=True):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    output = forward()
    gradient = torch.randn_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    return {"forward_seconds": forward, "backward_seconds": backward}


def launch_seconds(device: torch.device) -> float:
    """Host time of one in-place addition to one element."""
    element = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(LAUNCHES):
            element.add_(1)

    launch_all()
    synchronize(device)
    timings = []
    for _ in range(5):
        began = time.perf_counter()
        launch_all()
        synchronize(device)
        timings.append((time.perf_counter() - began) / LAUNCHES)
    return median(timings)


def median_seconds(step: Step, device: torch.device, seconds: float) -> float:
    """Median time of a call over batches that together take about ``seconds``."""
    for _ in range(WARM_UP_CALLS):
        step()
    once = max(batch_seconds(step, device, 1), 1e-7)
    repeats = max(1, round(max(SMALLEST_BATCH_SECONDS, seconds / MOST_BATCHES) / once))
    timings, deadline = [batch_seconds(step, device, repeats)], time.monotonic() + seconds
    while len(timings) < MOST_BATCHES and time.monotonic() < deadline:
        timings.append(batch_seconds(step, device, repeats))
    return median(timings)


def batch_seconds(step: Step, device: torch.device, repeats: int) -> float:
    """Time of one of ``repeats`` calls in a row, start-up of the first included."""
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - began) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeats


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median(values: Sequence[float]) -> float:
    """The middle of the values."""
    return float(statistics.median(values))
