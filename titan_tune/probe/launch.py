"""What is launched, and in which environment. Pure but for what it reads of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import site
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import titan_tune
from titan_tune.domain.probe import ProbeSpec
from titan_tune.probe import files
from titan_tune.titan.plugin import environment as plugin_environment

ALLOCATOR: Final = "expandable_segments:True"
"""torchtitan's own launch script sets it; without it fragmentation decides what fits."""

_RECORDED_PREFIXES: Final = (
    "TITAN_TUNE_", "PYTORCH_", "TORCH", "TRITON_", "CUDA_", "NCCL_", "GLOO_", "OMP_", "HIP_", "ROCR_", "HF_",
)  # fmt: skip
_RECORDED_PACKAGES: Final = (
    "titan-tune",
    "torch",
    "torchtitan",
    "torchao",
    "triton",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def torchrun_command(spec: ProbeSpec) -> list[str]:
    """torchrun on this node, a free port, one process a GPU; the same for one rank."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(spec.nproc_per_node),
        "--role", "rank", "--tee", "3", "--log-dir", str(spec.directory / files.LAUNCHER_LOGS),
        "-m", "torchtitan.train", *training_arguments(spec),
    ]  # fmt: skip


def training_arguments(spec: ProbeSpec) -> list[str]:
    """The command line of ``torchtitan.train``."""
    return ["--job.config_file", str(spec.directory / files.CONFIG)]


def probe_environment(spec: ProbeSpec, probe_id: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the launcher: the caller's, what a probe needs, then the spec's own variables.

    CUDA_VISIBLE_DEVICES stays as it is.
    """
    added = {
        plugin_environment.METRICS_DIR: str(spec.directory),
        plugin_environment.CACHE_DIR: str(spec.cache_directory),
        plugin_environment.DATA: spec.settings.data,
        plugin_environment.PROBE_ID: probe_id,
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.device == "cuda" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(inherited):
        added["PYTORCH_ALLOC_CONF"] = ALLOCATOR
    if spec.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        added["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc_per_node))
    if (root := _source_root()) is not None:
        added["PYTHONPATH"] = os.pathsep.join(filter(None, (root, inherited.get("PYTHONPATH"))))
    return {**inherited, **added, **dict(spec.environment)}


def command_text(command: Sequence[str], environment: Mapping[str, str], inherited: Mapping[str, str]) -> str:
    """``command.txt``: one shell command that runs the trial again, from any folder."""
    # without the metrics folder: a run by hand must not write over what was measured
    skipped = (plugin_environment.PROBE_ID, plugin_environment.METRICS_DIR)
    changed = [
        f"{name}={shlex.quote(value)}"
        for name, value in sorted(environment.items())
        if inherited.get(name) != value and name not in skipped
    ]
    # assignments, not env: that would take a program whose path holds "=" for one
    lines = [f"cd {shlex.quote(str(Path.cwd()))} &&", *changed, shlex.join(command)]
    return " \\\n  ".join(lines) + "\n"


def environment_record(spec: ProbeSpec, environment: Mapping[str, str]) -> dict[str, Any]:
    """``environment.json``: machine, versions, GPUs and the variables that matter."""
    return {
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: version for name in _RECORDED_PACKAGES if (version := _version(name))},
        "device": spec.device,
        "gpus": _gpus() if spec.device == "cuda" else [],
        "nproc_per_node": spec.nproc_per_node,
        "config_id": spec.config_id,
        "variables": {k: v for k, v in sorted(environment.items()) if k.startswith(_RECORDED_PREFIXES)},
    }


def _source_root() -> str | None:
    """The folder that holds the package where it is not an installed one: workers must find it too."""
    root = str(Path(titan_tune.__file__).resolve().parents[1])
    return None if root in site.getsitepackages() else root


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    """Name, total memory and driver of the machine's GPUs; empty where the driver does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "driver": driver,
            }
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()
