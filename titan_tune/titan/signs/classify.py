"""Exceptions to kinds of failure, and what a rank was doing when it raised."""

from __future__ import annotations

import re
from typing import Final

from titan_tune.titan.signs.configuration_failures import CONFIGURATION
from titan_tune.titan.signs.failure import Failure
from titan_tune.titan.signs.machine_failures import MACHINE, MEMORY
from titan_tune.titan.tracebacks import Frame, RaisedError

FAILURES: Final[tuple[Failure, ...]] = (*MEMORY, *CONFIGURATION, *MACHINE)
"""In the order in which they are tried: what names the configuration before what only names the mechanism."""

CUDA_OOM: Final = re.compile(
    r"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<asked>[\d.]+ ?\w+)(?:\. GPU (?P<gpu>\d+) has a total "
    r"capacit?y of (?P<total>[\d.]+ ?\w+) of which (?P<free>[\d.]+ ?\w+) is free)?"
)
CUDA_OOM_SPLIT: Final = re.compile(
    r"(?P<allocated>[\d.]+ ?\w+) is allocated by PyTorch(?:, with .*?)?, "
    r"and (?P<reserved>[\d.]+ ?\w+) is reserved by PyTorch but unallocated"
)

_UNIT_BYTES: Final = {"bytes": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def size_bytes(text: str) -> float:
    """``'3.91 GiB'`` in bytes; 0 for anything else."""
    match = re.fullmatch(r"([\d.]{1,20}) ?(\w+)", text)
    if match is None or match[2] not in _UNIT_BYTES or match[1].count(".") > 1 or match[1] == ".":
        return 0.0
    return float(match[1]) * _UNIT_BYTES[match[2]]


def classify(error: RaisedError) -> tuple[Failure, dict[str, str]] | None:
    """The kind of failure and its named groups, or ``None`` for one that the table does not know."""
    for failure in FAILURES:
        match = failure.match(error)
        if match is not None:
            return failure, {name: value or "" for name, value in match.groupdict().items()}
    return None


_PHASES: Final = (
    ("torchtitan/train.py:batch_generator", "reading data"),
    ("torchtitan/train.py:forward_backward_step", "the forward"),
    ("pipelining/stage.py:forward_one_chunk", "the forward"),
    ("torchtitan/components/loss.py:", "the loss"),
    ("pipelining/stage.py:backward", "the backward"),
    ("torch/_tensor.py:backward", "the backward"),
    ("distributed/utils.py:clip_grad_norm_", "gradient clipping"),
    ("components/optimizer.py:step", "the optimizer step"),
    ("components/checkpoint.py:", "checkpointing"),
    ("torch/_inductor/compile_fx.py:", "compilation"),
    ("torch/_dynamo/convert_frame.py:", "compilation"),
)
"""What the innermost of these frames says the rank was doing; ``file:function``."""


def phase_of(frames: tuple[Frame, ...], *, started: bool) -> str:
    """What a rank was doing when it raised: the innermost frame that tells; start-up before step 1."""
    phase = "the step" if started else "start-up"
    for frame in frames:
        place = f"{frame.file}:{frame.function}"
        phase = next((name for part, name in _PHASES if part in place), phase)
    return phase
