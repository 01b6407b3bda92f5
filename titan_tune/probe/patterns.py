"""The words by which torch, NCCL, gloo, torchtitan and the system say what went wrong.

Matched against the message of the exception that began a failure, or, where no exception was recorded
(a crash in native code, a launcher that never started), against the end of the log.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from titan_tune.domain.probe import ProbeStatus


def _any(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives))


HOST_OOM: Final = _any(
    r"DefaultCPUAllocator: (can't|not enough)",
    r"Cannot allocate memory",
    r"builtins\.MemoryError",
    r"unable to mmap",
)

DEVICE_OOM: Final = _any(
    r"OutOfMemoryError",
    r"(CUDA|HIP|XPU)[^\n]{0,20} out of memory",
    r"(CUDA|HIP) error: out of memory",
    r"Cuda failure (2 )?'out of memory'",  # NCCL
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"CUDNN_STATUS_ALLOC_FAILED",
)

COLLECTIVE_TIMEOUT: Final = _any(
    r"Watchdog caught collective operation timeout",
    r"Timed out waiting \d+ms for (recv|send)",  # gloo
    r"wait timeout after \d+ms",
    r"DistStoreError: Timed out|DistStoreError: wait timeout",
)

PEER_IS_GONE: Final = _any(
    r"[Cc]onnection (closed|reset|refused)",
    r"Broken pipe",
    r"ncclRemoteError",
    r"remote process exited",
    r"NCCL communicator was aborted",
)
"""What ranks report when another one has died."""

INFRASTRUCTURE: Final = _any(
    r"No space left on device",
    r"Disk quota exceeded",
    r"Too many open files",
    r"Stale file handle",
    r"Read-only file system",
    r"EADDRINUSE|[Aa]ddress already in use",
    r"NCCL (WARN|error)[^\n]*(system error|internal error|remote error)",
    r"ncclSystemError|ncclInternalError|ncclRemoteError",
    r"NCCL error in:",
    r"uncorrectable (ECC|NVLink)|ECC error|double bit error",
    r"NVRM: Xid|\bXid\b",
    r"Found no NVIDIA driver|CUDA driver version is insufficient|driver/library version mismatch",
    r"no CUDA-capable device|CUDA-capable device\(s\) is/are busy|CUDA unknown error",
    r"system not yet initialized|system has unsupported display driver",  # fabric manager
    r"CUDA error: (initialization error|invalid device ordinal|unspecified launch failure)",
    r"No working C\+\+ compiler|InvalidCxxCompiler|Failed to find C compiler",
    r"No module named '?(torchtitan|torch|titan_tune)\b|cannot import name .* from '?(torchtitan|torch)\b",
    r"Error while finding module specification for 'torchtitan",
    r"(libcuda|libnccl|libcudart|libcublas)[^\n]*cannot open shared object file",
    r"Backend fake does not yet support sequence numbers",  # a limit of the dry run, not of the job
    r"Tokenizer path .* does not exist",
    r"(Couldn't reach|Max retries exceeded|HfHubHTTPError|LocalEntryNotFoundError|offline mode is enabled)",
    r"RendezvousTimeoutError|RendezvousConnectionError",
)

_CACHE_FILE: Final = re.compile(r"triton|inductor|torchinductor", re.IGNORECASE)

_COMPILER_TYPES: Final = (
    "torch._dynamo.",
    "torch._inductor.",
    "torch._functorch.",
    "triton.",
    "torch.fx.experimental.symbolic_shapes.",
)

WORKER_EXIT: Final = re.compile(
    r"rank\s*:\s*(?P<rank>\d+) \(local_rank[^\n]*\n(?:[^\n]*\n)?[^\n]*exitcode\s*:\s*(?P<exitcode>-?\d+) \(pid"
)
"""A worker in torchrun's summary of failures."""

_EXCEPTION_LINE: Final = re.compile(
    r"^(?:\[[^\]]*\]:?\s*)?(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Unsupported|NotFound|Exit)\b:? .+)$"
)
_TORCHRUN_OWN: Final = re.compile(r"ChildFailedError|SignalException")
_LOG_PREFIX: Final = re.compile(r"^(\[[^\]]*\]:?\s*)+")
_TYRO: Final = re.compile(r"(Parsing error|Unrecognized options|Invalid choice)")


class LogFinding(NamedTuple):
    """A line of the log that decides."""

    status: ProbeStatus
    line: str


def status_of_error(kind: str, message: str, phase: str) -> ProbeStatus:
    """What an exception means, from its qualified type, its message and the phase it came in.

    Anything that is neither memory, nor a hang, nor the machine's fault, nor the compiler's was raised
    by torchtitan or torch about the configuration.
    """
    text = f"{kind}: {message}"
    if DEVICE_OOM.search(text) or HOST_OOM.search(text):
        return ProbeStatus.OOM  # first: the compiler wraps it in its own exceptions
    if COLLECTIVE_TIMEOUT.search(text):
        return ProbeStatus.HANG
    if PEER_IS_GONE.search(text) or INFRASTRUCTURE.search(text):
        return ProbeStatus.INFRASTRUCTURE
    if kind.endswith("FileNotFoundError"):
        # compile caches lose files to races (torchtitan #2146); a data or asset path is not the candidate's
        return ProbeStatus.INFRASTRUCTURE
    if phase == "compile" or kind.startswith(_COMPILER_TYPES):
        return ProbeStatus.COMPILE_FAILURE
    return ProbeStatus.UNSUPPORTED


def status_of_log(log: str) -> LogFinding | None:
    """What the end of a log says where no exception was recorded; the earliest line that decides."""
    order = (
        (ProbeStatus.OOM, DEVICE_OOM),
        (ProbeStatus.OOM, HOST_OOM),
        (ProbeStatus.HANG, COLLECTIVE_TIMEOUT),
        (ProbeStatus.INFRASTRUCTURE, INFRASTRUCTURE),
        (ProbeStatus.UNSUPPORTED, _TYRO),
        (ProbeStatus.UNSUPPORTED, re.compile(r"Ran out of data; last step was canceled")),
    )
    for line in log.splitlines():
        for status, pattern in order:
            if pattern.search(line):
                return LogFinding(status, _LOG_PREFIX.sub("", line).strip())
    return None


def last_exception(log: str) -> str | None:
    """The last exception that the log names and that is not torchrun's report of its workers."""
    for line in reversed(log.splitlines()):
        match = _EXCEPTION_LINE.match(line)
        if match and not _TORCHRUN_OWN.search(line):
            return match["text"]
    return None


def first_lines(message: str, *, count: int = 3) -> str:
    """The first non-empty lines of a message on one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:count])
