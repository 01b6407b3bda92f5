"""Runs a trace in a child process: torch, its patches and its memory stay there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from titan_tune.domain.candidate import Value
from titan_tune.errors import TitanTuneError
from titan_tune.trace.allocator import AllocatorMode
from titan_tune.trace.result import TraceResult

TIMEOUT_SECONDS: Final = 900.0
_STDERR_LINES: Final = 20


class TraceError(TitanTuneError):
    """torchtitan refused the configuration, or the trace broke; the message is torchtitan's own."""


def trace_memory(
    job_values: Mapping[str, Value],
    *,
    model_args: Mapping[str, Any],
    world_size: int,
    rank: int = 0,
    layers: int | None = None,
    allocator: AllocatorMode = "expandable",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> TraceResult:
    """Memory of one rank of a job, from two traced training steps.

    Args:
        job_values: dotted torchtitan keys; those left out have torchtitan's defaults.
        model_args: fields of the model family's arguments that define the flavor afresh, or empty for a
            flavor that torchtitan ships.
        world_size: ranks of the job.
        rank: the rank that is traced; ranks differ only along the pipeline.
        layers: trace models of only this and a few more layers and extrapolate to the full depth: exact for
            active bytes where all layers are alike, says nothing about reserved ones. ``None``: full depth.
        allocator: ``PYTORCH_ALLOC_CONF=expandable_segments:True`` or the default segments.
        timeout_seconds: wall clock of the child process.

    Raises:
        TraceError: torchtitan raised an error, the child died, or the time ran out.
    """
    request = json.dumps(
        {
            "values": dict(job_values),
            "model_args": dict(model_args),
            "world_size": world_size,
            "rank": rank,
            "layers": layers,
            "allocator": allocator,
        }
    )
    stdout, stderr, returncode = _run_child(request, timeout_seconds)
    try:
        answer = json.loads(stdout)
    except ValueError:
        raise TraceError(f"the trace ended with exit code {returncode}: {_last_lines(stderr)}") from None
    if "error" in answer:
        raise TraceError(answer["error"])
    return TraceResult.from_dict(answer)


def _run_child(request: str, timeout_seconds: float) -> tuple[str, str, int]:
    command = [sys.executable, "-m", "titan_tune.trace.child"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    ) as child:
        try:
            stdout, stderr = child.communicate(request, timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            raise TraceError(f"the trace did not end within {timeout_seconds:.0f} s") from None
        finally:
            # also on KeyboardInterrupt; a child that has ended is not signalled again
            child.kill()
        return stdout, stderr, child.returncode


def _environment() -> dict[str, str]:
    # no GPU that this machine has may be touched, and compile caches of real runs stay as they are
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


def _last_lines(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return " | ".join(lines[-_STDERR_LINES:]) or "no output"
