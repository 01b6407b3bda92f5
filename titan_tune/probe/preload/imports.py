"""What a zygote imports before it forks, and proof that a GPU was left alone. Runs in the zygote."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Final

MODULES: Final = (
    "torch",
    "psutil",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.triton",
    "torch.distributed.elastic.multiprocessing.errors",
    "triton",
    "torchao.float8",
    "torchtitan.components.quantization.float8",
    "torchtitan.train",
)
"""What every probe imports sooner or later, in an order that works; none of them touches a GPU.

Not the plug-in: it arms itself when it is first imported, which must happen in a rank.
"""

RUN_AS_MAIN: Final = "torchtitan.train"
"""What a rank runs as ``__main__``."""

WHILE_IMPORTING: Final = {
    # torch asks NVML, not the CUDA runtime, whether there is a GPU: cuInit in a parent breaks its forks
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Inductor's compile workers belong to the rank that needs them
    "TORCH_WARM_POOL": "0",
}

_CUDA_ERROR_NOT_INITIALIZED: Final = 3
"""cuda.h."""


def preload() -> dict[str, float]:
    """Import everything; seconds by module. Raises RuntimeError where an import initialised CUDA."""
    before = {name: os.environ.get(name) for name in WHILE_IMPORTING}
    os.environ.update(WHILE_IMPORTING)
    seconds = {}
    for name in MODULES:
        began = time.perf_counter()
        importlib.import_module(name)
        seconds[name] = round(time.perf_counter() - began, 3)
        if cuda_is_initialised():
            raise RuntimeError(f"importing {name} initialised CUDA")
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    _hash_installations()
    forget(RUN_AS_MAIN)
    gc.collect()
    gc.freeze()  # what is shared stays out of the ranks' collections, which would copy its pages
    atexit.register(gc.unfreeze)  # but a rank that ends takes it down as any interpreter does
    return seconds


def _hash_installations() -> None:
    """Compile-cache keys hash all of torch's and Triton's files: the same in every process, and seconds each."""
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    torch_key()
    if HAS_TRITON:
        triton_key()


def forget(name: str) -> None:
    """Make ``name`` a module that was never imported, while what it imported stays."""
    package, _, child = name.rpartition(".")
    del sys.modules[name]
    delattr(sys.modules[package], child)


def cuda_is_initialised() -> bool:
    """Whether the CUDA driver was initialised in this process, by whomever."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    if not re.search(r"/libcuda\.so", Path("/proc/self/maps").read_text()):
        return False
    count = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    return bool(status != _CUDA_ERROR_NOT_INITIALIZED)
