"""Exact memory of one training step of the real torchtitan model, on a CPU, without a GPU.

``trace_memory`` starts a child process that runs two training steps under fake tensors; this package
imports torch and torchtitan nowhere else.
"""

from titan_tune.trace.result import TraceResult
from titan_tune.trace.run import TraceError, trace_memory

__all__ = ["TraceError", "TraceResult", "trace_memory"]
