"""``python -m titan_tune.trace.child``: a request on stdin → a trace on stdout, both JSON."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
import warnings
from typing import Any, Final

from titan_tune.trace.allocator import replay
from titan_tune.trace.events import Event, timeline
from titan_tune.trace.extrapolate import Depth, depths, extrapolated
from titan_tune.trace.result import TraceResult

TIMELINE_POINTS: Final = 600
PR_SET_PDEATHSIG: Final = 1
"""linux/prctl.h."""


def main() -> None:
    """Answer one request. Errors of torchtitan become ``{"error": message}``."""
    _end_with_parent()
    answer_file = os.dup(1)
    os.dup2(2, 1)  # what torchtitan or its imports print must not mix with the answer
    request = json.load(sys.stdin)
    warnings.filterwarnings("ignore")
    try:
        answer = trace(request).as_dict()
    except Exception as error:
        logging.getLogger(__name__).exception("trace failed")
        answer = {"error": f"{type(error).__name__}: {_first_line(error)}"}
    with os.fdopen(answer_file, "w") as out:
        json.dump(answer, out)


def _end_with_parent() -> None:
    """Linux ends this process when the thread that started it does, were it by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"


def trace(request: dict[str, Any]) -> TraceResult:
    """Trace one rank as :func:`titan_tune.trace.trace_memory` describes."""
    began = time.monotonic()
    from titan_tune.trace.session import Session

    session = Session(
        request["values"], request["model_args"], world_size=request["world_size"], rank=request["rank"]
    )
    full = session.num_layers
    wanted = depths(full, request["layers"], period=session.layer_period, special=session.special_layers)
    traces = [Depth(layers, session.events(layers)) for layers in wanted]
    peak = extrapolated(traces, full)
    return TraceResult(
        active_bytes=peak.active_bytes,
        phase=peak.phase,
        components=peak.components,
        phases=peak.phases,
        reserved_bytes=_reserved(traces[-1].events, request["allocator"]) if len(traces) == 1 else None,
        allocator=request["allocator"],
        timeline=timeline(traces[-1].events, points=TIMELINE_POINTS),
        rank=request["rank"],
        stages=session.stages,
        traced_layers=tuple(wanted),
        num_events=len(traces[-1].events),
        seconds=round(time.monotonic() - began, 2),
        torch_version=session.torch_version,
        assumptions=session.assumptions(),
    )


def _reserved(events: list[Event], allocator: Any) -> int:
    return max(step.reserved_bytes for step in replay(events, allocator))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's threads and process group need no farewell
