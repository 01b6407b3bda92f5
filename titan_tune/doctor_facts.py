"""Reads what ``titan_tune.doctor`` judges: torch in a process of its own, the driver, Slurm, the machine."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from titan_tune.titan.logs import strip_ansi

COMMAND_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What a fresh interpreter says after importing torch and its companions."""

    versions: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    """Import errors by package, one line each."""
    cuda_version: str = ""
    """Of the build; empty for a CPU or ROCm build."""
    hip_version: str = ""
    num_devices: int = 0
    cuda_problem: str = ""
    nccl_version: str = ""
    peer_access: bool | None = None
    """Whether every pair of devices has it; ``None`` where there is no pair."""
    problem: str = ""
    """Why nothing came back at all: a crash, a timeout."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, from the driver."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    capability: tuple[int, int]
    mig: bool = False
    ecc_errors: int = 0


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """All of them. ``problem`` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda_version: str = ""
    """The newest CUDA that the driver can run."""
    nvlinks: int = 0
    """Active links of the GPU that has the fewest."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """Slurm's commands on this machine. The problems are empty where the daemon answered."""

    commands: tuple[str, ...] = ()
    version: str = ""
    controller_problem: str = ""
    accounting_problem: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Everything else."""

    python: tuple[int, int, int] = (3, 11, 0)
    compiler: str = ""
    """Its first line of ``--version``."""
    compiler_problem: str = ""
    has_python_headers: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    runs_dir: str = "runs"
    runs_writable: bool = True
    disk_free_bytes: int = 0
    shared_memory_bytes: int | None = None
    open_files: int = 0


# --- torch ---------------------------------------------------------------------------------------

_MARK: Final = "titan-tune-doctor:"
_TORCH_SCRIPT: Final = """
import importlib, json, sys
from importlib.metadata import version
facts = {"versions": {}, "errors": {}}
for name in ("torch", "triton", "torchao", "torchtitan", "optuna"):
    try:
        importlib.import_module("torchtitan.train" if name == "torchtitan" else name)
        facts["versions"][name] = version(name)
    except BaseException as error:
        facts["errors"][name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
torch = sys.modules.get("torch")
if "torch" in facts["versions"]:
    facts["versions"]["torch"] = torch.__version__
    facts["cuda_version"] = torch.version.cuda or ""
    facts["hip_version"] = torch.version.hip or ""
    try:
        facts["num_devices"] = count = torch.cuda.device_count()
        if count:
            torch.cuda.init()
        if torch.version.cuda and torch.distributed.is_nccl_available():
            facts["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        if pairs:
            facts["peer_access"] = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    except Exception as error:
        facts["num_devices"] = 0
        facts["cuda_problem"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
print("titan-tune-doctor:" + json.dumps(facts))
"""


def read_torch(timeout_seconds: float, *, python: str = sys.executable) -> TorchFacts:
    """Import torch in a fresh interpreter, which may crash or hang: that is then the answer."""
    try:
        done = subprocess.run(
            [python, "-c", _TORCH_SCRIPT],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(problem=f"importing torch took more than {timeout_seconds:g} s")
    except OSError as error:
        return TorchFacts(problem=f"{python}: {error.strerror}")
    return torch_facts(done.stdout, done.stderr, done.returncode)


def torch_facts(stdout: str, stderr: str, returncode: int) -> TorchFacts:
    """The facts that the interpreter printed, or why it printed none."""
    line = next((text for text in reversed(stdout.splitlines()) if text.startswith(_MARK)), None)
    if line is not None:
        values: dict[str, Any] = json.loads(line.removeprefix(_MARK))
        return TorchFacts(**values)
    if returncode < 0:
        return TorchFacts(problem=f"importing torch crashed ({_signal_name(-returncode)})")
    last = next(
        (text.strip() for text in reversed(strip_ansi(stderr).splitlines()) if text.strip()), "no output"
    )
    return TorchFacts(problem=f"importing torch ended with code {returncode}: {last[:300]}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- driver --------------------------------------------------------------------------------------


def read_gpus() -> GpuFacts:
    """NVIDIA GPUs by NVML, which needs no torch and takes no GPU memory."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuFacts(problem=f"none ({error})")
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        return GpuFacts(
            gpus=tuple(_gpu(pynvml, index, handle) for index, handle in enumerate(handles)),
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
            nvlinks=min((_nvlinks(pynvml, handle) for handle in handles), default=0),
        )
    except pynvml.NVMLError as error:
        return GpuFacts(problem=f"the driver does not answer: {error}")
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int, handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        mig=bool(_supported(pynvml, lambda: pynvml.nvmlDeviceGetMigMode(handle)[0])),
        ecc_errors=_supported(
            pynvml,
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            ),
        ),
    )


def _nvlinks(pynvml: Any, handle: Any) -> int:
    """Active NVLinks of one GPU."""
    links = range(pynvml.NVML_NVLINK_MAX_LINKS)
    return sum(_supported(pynvml, lambda n=n: pynvml.nvmlDeviceGetNvLinkState(handle, n)) == 1 for n in links)


def _supported(pynvml: Any, ask: Any) -> int:
    """The answer, or 0 from a GPU that does not have what was asked for."""
    try:
        return int(ask())
    except pynvml.NVMLError:
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# --- Slurm ---------------------------------------------------------------------------------------

_SLURM_COMMANDS: Final = ("sbatch", "squeue", "scancel", "sacct", "scontrol")


def read_slurm() -> SlurmFacts:
    """Which commands there are, and whether the controller and the accounting answer."""
    commands = tuple(name for name in _SLURM_COMMANDS if shutil.which(name))
    if "squeue" not in commands:
        return SlurmFacts(commands)
    version, _ = answer(["squeue", "--version"])
    # an empty list of the caller's own jobs is the cheapest question that reaches the controller
    _, controller = answer(["squeue", "--noheader", "--me", "--format=%i"])
    accounting = "no sacct"
    if "sacct" in commands:
        _, accounting = answer(["sacct", "--noheader", "-X", "--format=JobID", "--starttime=now"])
    return SlurmFacts(commands, version, controller, accounting)


def answer(command: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> tuple[str, str]:
    """(first line it printed, why it failed): one of the two is empty for a command that prints."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} did not answer within {seconds:g} s"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        return "", said[0].strip() if said else f"{command[0]} ended with code {done.returncode}"
    return next(iter(done.stdout.splitlines()), "").strip(), ""


# --- the machine ---------------------------------------------------------------------------------


def read_machine(runs_dir: Path) -> MachineFacts:
    """Interpreter, compiler, environment, disk, shared memory, limits."""
    compiler, problem = _compiler()
    folder = _existing(runs_dir)
    shared = Path("/dev/shm")
    return MachineFacts(
        python=sys.version_info[:3],
        compiler=compiler,
        compiler_problem=problem,
        has_python_headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        environment=dict(os.environ),
        runs_dir=str(runs_dir),
        runs_writable=folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
        disk_free_bytes=shutil.disk_usage(folder).free,
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _compiler() -> tuple[str, str]:
    """(what it says it is, why there is none): CXX, else g++ and clang++, as inductor looks for them."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++"):
        if shutil.which(name):
            return answer([name, "--version"])
    return "", f"CXX={wanted} is not there" if wanted else "neither g++ nor clang++"


def _existing(folder: Path) -> Path:
    """``folder``, or the nearest folder above it that exists."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())
