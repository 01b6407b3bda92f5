"""Sizes and how they are printed. Bytes inside, GiB outside."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


def gib(num_bytes: float) -> float:
    """Bytes as GiB."""
    return num_bytes / GIB


def format_gib(num_bytes: float) -> str:
    """Bytes as a short GiB text, e.g. ``'23.1 GiB'``."""
    return f"{num_bytes / GIB:.1f} GiB"


def format_duration(seconds: float) -> str:
    """Seconds as ``'42 s'``, ``'3 min 20 s'`` or ``'1 h 05 min'``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
