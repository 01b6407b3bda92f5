"""``error.rank*.json``: the first exception of a rank, where it came from, and the memory at that moment."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final

MESSAGE_CHARACTERS: Final = 2000
TRACEBACK_FRAMES: Final = 12

_PHASE_OF_FRAME: Final = (
    ("torchtitan/train.py", "batch_generator", "data"),
    ("torchtitan/train.py", "forward_backward_step", "forward"),
    ("torch/distributed/pipelining/stage.py", "forward_one_chunk", "forward"),
    ("torch/distributed/pipelining/stage.py", "backward_one_chunk", "backward"),
    ("torch/distributed/pipelining/stage.py", "backward_weight_one_chunk", "backward"),
    ("torch/_tensor.py", "backward", "backward"),
    ("torchtitan/distributed/utils.py", "clip_grad_norm_", "gradient_clipping"),
    ("torchtitan/components/optimizer.py", "step", "optimizer"),
    ("torchtitan/components/metrics.py", "log", "logging"),
)
"""Who must be on the stack, outermost first, for the step to be in a phase."""

_COMPILING_FILES: Final = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
"""On the stack only while something is being compiled (``eval_frame.py`` is there at run time too)."""

_COMPILED_CODE_FILES: Final = ("torch/_dynamo/", "torch/_inductor/", "torch/_functorch/")
"""Where an exception is raised by the machinery around compiled code, not by the model."""

_ASKED: Final = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|B|KiB|MiB|GiB)")
_UNIT_BYTES: Final = {"bytes": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


class FailureRecorder:
    """Writes the first exception of this rank; later ones are consequences."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = directory / f"error.rank{rank}.json"
        self.rank = rank
        self.step = 0
        """The running step; 0 before training."""
        self._written = False

    def install(self) -> None:
        """Record what reaches the top of the process, then report it as before."""
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, Exception):
                self.write(error)
            previous(kind, error, trace)

        sys.excepthook = hook

    def write(self, error: Exception) -> None:
        """Record ``error`` unless one was recorded; whole or not at all."""
        if self._written:
            return
        self._written = True
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(describe(error, rank=self.rank, step=self.step)) + "\n")
        temporary.replace(self.path)


def describe(error: Exception, *, rank: int, step: int) -> dict[str, Any]:
    """The record of ``error``: type, message, phase, step, time, innermost frames, memory in bytes."""
    frames = traceback.extract_tb(error.__traceback__)
    # a bare assert says nothing: its source line does
    message = str(error).strip() or (frames[-1].line or "" if frames else "")
    return {
        "rank": rank,
        "pid": os.getpid(),
        "time": time.time(),
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": message[:MESSAGE_CHARACTERS],
        "phase": phase_of([(frame.filename, frame.name) for frame in frames], started=step > 0),
        "step": step,
        "bytes_asked": bytes_asked(message),
        "frames": [f"{f.filename}:{f.lineno} {f.name}" for f in frames[-TRACEBACK_FRAMES:]],
        **_memory_now(),
    }


def phase_of(frames: list[tuple[str, str]], *, started: bool) -> str:
    """Phase from the (file, function) frames of a traceback, outermost first.

    One of init, data, forward, backward, gradient_clipping, optimizer, logging, compile, or step where
    no frame says more. Compilation wins: it happens inside a forward or a backward.
    What the wrappers of compiled code raise counts as compilation too.
    """
    phase = "step" if started else "init"
    for filename, function in frames:
        if filename.endswith(_COMPILING_FILES):
            return "compile"
        for suffix, name, named_phase in _PHASE_OF_FRAME:
            if started and function == name and filename.endswith(suffix):
                phase = named_phase
    if frames and any(part in frames[-1][0] for part in _COMPILED_CODE_FILES):
        return "compile"
    return phase


def bytes_asked(message: str) -> int | None:
    """The size of the allocation that failed, from torch's message (CUDA's and the CPU allocator's)."""
    match = _ASKED.search(message)
    return round(float(match[1]) * _UNIT_BYTES[match[2]]) if match else None


def _memory_now() -> dict[str, int]:
    """Allocated and reserved bytes of this rank's device, where it has an allocator."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    try:
        stats = torch.cuda.memory_stats()
    except RuntimeError:  # a CUDA context that is lost answers nothing
        return {}
    return {
        "allocated_bytes": stats.get("allocated_bytes.all.current", 0),
        "reserved_bytes": stats.get("reserved_bytes.all.current", 0),
    }
