"""What will work on this machine, and what silently will not.

Every check is a pure function of facts that were read before; the readers are in ``titan_tune.doctor_facts``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from titan_tune.doctor_facts import (
    GpuFacts,
    MachineFacts,
    SlurmFacts,
    TorchFacts,
    read_gpus,
    read_machine,
    read_slurm,
    read_torch,
)
from titan_tune.units import GIB, format_gib


class Status(StrEnum):
    """``fail``: probes cannot run here. ``warn``: something will not work, or not as expected."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what was found, what that means, what to do about it."""

    name: str
    status: Status
    found: str
    meaning: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """As ``doctor --json`` prints it."""
        return {**asdict(self), "status": self.status.value}


TESTED_PYTHON: Final = ((3, 11), (3, 12))
TESTED: Final = {
    "torchtitan": ("0.2.2",),
    "torchao": ("0.17.0",),
    "torch": ("2.11", "2.13"),
    "optuna": ("5.0",),
}
"""What the tests and the measurements ran with: torch 2.11 on H200, 2.13 on CPU."""
MIN_TORCH: Final = (2, 11)
MIN_OPTUNA: Final = (5,)
FREE_DISK_BYTES: Final = 10 * GIB
"""Room for compile caches and logs of a search; below 1 GiB nothing is started."""
SHARED_MEMORY_BYTES: Final = 1 * GIB
"""NCCL and data loaders share buffers in /dev/shm; a container's default is 64 MiB."""
OPEN_FILES: Final = 4096
FLOAT8_CAPABILITY, GROUPED_MM_CAPABILITY, MXFP8_CAPABILITY = (8, 9), (9, 0), (10, 0)


def checks(*, runs_dir: Path = Path("runs"), timeout_seconds: float = 120.0) -> tuple[Check, ...]:
    """Look at this machine. Takes the seconds that importing torch takes, at most ``timeout_seconds``."""
    torch, gpus = read_torch(timeout_seconds), read_gpus()
    return all_checks(torch, gpus, read_slurm(), read_machine(runs_dir))


def all_checks(
    torch: TorchFacts, gpus: GpuFacts, slurm: SlurmFacts, machine: MachineFacts
) -> tuple[Check, ...]:
    """Every check, in the order in which they are printed."""
    found = [python_check(machine), *package_checks(torch), gpu_check(torch, gpus)]
    if gpus.gpus:
        found += [*capability_checks(gpus), gpu_use_check(gpus), nccl_check(torch), link_check(torch, gpus)]
    found += [
        compiler_check(torch, machine, has_gpu=bool(gpus.gpus)),
        allocator_check(machine.environment, has_gpu=bool(gpus.gpus)),
        slurm_check(slurm),
        disk_check(machine),
        shared_memory_check(machine),
        open_files_check(machine),
    ]
    return tuple(found)


# --- versions ------------------------------------------------------------------------------------


def python_check(machine: MachineFacts) -> Check:
    """The interpreter that runs this."""
    version = ".".join(map(str, machine.python))
    if machine.python[:2] < (3, 11):
        return Check("Python", Status.FAIL, version, "too old", "use Python 3.11 or later")
    if machine.python[:2] not in TESTED_PYTHON:
        return Check("Python", Status.WARN, version, "not tested (3.11 and 3.12 are)")
    return Check("Python", Status.OK, version, "tested")


def package_checks(torch: TorchFacts) -> list[Check]:
    """torch and what is beside it: imported in a process of its own, so that a broken one has a reason."""
    if torch.problem:
        fix = "pip install 'titan-tune[probe]' into this environment"
        return [Check("torch", Status.FAIL, torch.problem, "probes cannot start; estimates work", fix)]
    found = []
    for name in ("torch", "torchtitan", "torchao", "optuna"):
        error, version = torch.errors.get(name), torch.versions.get(name, "")
        if error:
            fix = _import_fix(name, error)
            found.append(Check(name, Status.FAIL, error, "probes cannot start; estimates work", fix))
        else:
            found.append(_version_check(name, version))
    return found


def _import_fix(name: str, error: str) -> str:
    if "triton" in error:
        return "pip install triton (torchtitan imports it; a CPU-only torch does not bring it)"
    return (
        "pip install 'titan-tune[probe]'"
        if "No module named" in error
        else f"reinstall {name}: its import fails"
    )


def _version_check(name: str, version: str) -> Check:
    tested = TESTED[name]
    if name == "torchtitan" and version not in tested:
        meaning = "rules, memory model and log format are those of 0.2.2"
        return Check(name, Status.FAIL, version, meaning, "pip install torchtitan==0.2.2")
    minimum = {"torch": MIN_TORCH, "optuna": MIN_OPTUNA}.get(name)
    if minimum is not None and _numbers(version) < minimum:
        needed = ".".join(map(str, minimum))
        return Check(name, Status.FAIL, version, "too old", f"pip install '{name}>={needed}'")
    if not version.startswith(tested):
        return Check(
            name, Status.WARN, version, f"not tested ({', '.join(tested)})", "measure before you trust it"
        )
    return Check(name, Status.OK, version, "tested")


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts[:2] if part.isdigit())


# --- GPUs ----------------------------------------------------------------------------------------


def gpu_check(torch: TorchFacts, gpus: GpuFacts) -> Check:
    """GPUs that the driver has, beside those that torch can use."""
    if not gpus.gpus and torch.num_devices:
        found = (
            f"{torch.num_devices} that torch sees (ROCm {torch.hip_version})"
            if torch.hip_version
            else gpus.problem
        )
        meaning = "the NVIDIA driver's library does not know them: capability, links and use are not checked"
        return Check("GPU", Status.WARN, found, meaning, "name the GPU with --gpu, e.g. --gpu mi300x")
    if not gpus.gpus:
        meaning = "probes run torchtitan on CPU processes (gloo): rules and plumbing are real, speeds are not a GPU's"
        return Check("GPU", Status.OK, gpus.problem or "none", meaning)
    names = sorted({f"{gpu.name} ({format_gib(gpu.memory_bytes)})" for gpu in gpus.gpus})
    found = f"{len(gpus.gpus)} x {', '.join(names)}; driver {gpus.driver} (CUDA {gpus.cuda_version})"
    if torch.versions and not torch.cuda_version and not torch.hip_version:
        fix = "install a CUDA build of torch (pytorch.org), then titan-tune doctor again"
        return Check("GPU", Status.WARN, found, "this torch is a CPU build: probes use the CPU", fix)
    if torch.versions and torch.num_devices == 0:
        why = torch.cuda_problem or "torch sees no device"
        fix = "check CUDA_VISIBLE_DEVICES, and that the driver is as new as torch's CUDA"
        return Check("GPU", Status.FAIL, found, f"torch cannot use them: {why}", fix)
    if len(names) > 1:
        return Check("GPU", Status.WARN, found, "different GPUs: the slowest decides", "use identical ones")
    if torch.num_devices and torch.num_devices < len(gpus.gpus):
        return Check(
            "GPU", Status.OK, found, f"torch sees {torch.num_devices} of them (CUDA_VISIBLE_DEVICES)"
        )
    return Check("GPU", Status.OK, found, "torch sees them")


def capability_checks(gpus: GpuFacts) -> list[Check]:
    """What the compute capability allows; the smallest one decides."""
    capability = min(gpu.capability for gpu in gpus.gpus)
    have = f"SM {capability[0]}.{capability[1]}"
    found = []
    for name, needed, without in (
        ("float8", FLOAT8_CAPABILITY, "quantize.linear.float8 is refused"),
        ("grouped mm", GROUPED_MM_CAPABILITY, "MoE experts run one after the other"),
        ("mxfp8", MXFP8_CAPABILITY, "quantize.linear.mx is refused"),
    ):
        text = f"SM {needed[0]}.{needed[1]}"
        works = capability >= needed
        # a search leaves these out by itself, so nothing is wrong with a GPU that lacks them
        meaning = f"works (from {text})" if works else f"needs {text}: {without}"
        found.append(Check(name, Status.OK, have, meaning))
    return found


def gpu_use_check(gpus: GpuFacts) -> Check:
    """Whether someone else is on the GPUs, and whether they are whole and sound."""
    broken = [gpu.index for gpu in gpus.gpus if gpu.ecc_errors]
    if broken:
        meaning = "uncorrected memory errors: results may be wrong and runs may crash"
        return Check(
            "GPU state", Status.WARN, f"ECC errors on GPU {_list(broken)}", meaning, "reset or replace it"
        )
    sliced = [gpu.index for gpu in gpus.gpus if gpu.mig]
    if sliced:
        meaning = "memory and speed are those of a slice, not of the catalogue's GPU"
        return Check(
            "GPU state", Status.WARN, f"MIG on GPU {_list(sliced)}", meaning, "measure on whole GPUs"
        )
    used = {gpu.index: gpu.used_bytes for gpu in gpus.gpus if gpu.used_bytes > 2 * GIB}
    if used:
        text = ", ".join(f"GPU {index}: {format_gib(size)}" for index, size in used.items())
        meaning = "others use the memory and the time of probes"
        return Check(
            "GPU state", Status.WARN, f"in use: {text}", meaning, "end them, or set CUDA_VISIBLE_DEVICES"
        )
    return Check("GPU state", Status.OK, "idle", "nothing else runs on them")


def nccl_check(torch: TorchFacts) -> Check:
    """The collectives library in this torch."""
    if not torch.nccl_version:
        meaning = "no NCCL in this torch: probes on more than one GPU cannot run"
        return Check("NCCL", Status.WARN, "none", meaning, "install a CUDA build of torch")
    return Check("NCCL", Status.OK, torch.nccl_version, "in torch")


def link_check(torch: TorchFacts, gpus: GpuFacts) -> Check:
    """How the GPUs of this node reach each other."""
    if len(gpus.gpus) < 2:
        return Check("links", Status.OK, "one GPU", "nothing to link")
    if torch.peer_access is False:
        meaning = "no peer access: collectives go through host memory, FSDP and tensor parallelism are slow"
        fix = "check ACS and IOMMU settings; nvidia-smi topo -p2p r shows the pairs"
        return Check("links", Status.WARN, f"{gpus.nvlinks} NVLinks a GPU", meaning, fix)
    if gpus.nvlinks == 0:
        meaning = "no NVLink: the step-time model assumes the catalogue's links; run titan-tune calibrate"
        return Check("links", Status.WARN, "PCIe", meaning, "prefer layouts with little communication")
    return Check("links", Status.OK, f"{gpus.nvlinks} NVLinks a GPU", "peers reach each other")


# --- compiler, allocator -------------------------------------------------------------------------


def compiler_check(torch: TorchFacts, machine: MachineFacts, *, has_gpu: bool) -> Check:
    """What torch.compile needs to build kernels."""
    name, fix_end = "compiler", "; or search with compile.enable = false"
    if not machine.compiler:
        meaning = "torch.compile fails: no C++ compiler"
        return Check(
            name, Status.WARN, machine.compiler_problem, meaning, "install g++, or set CXX" + fix_end
        )
    if not machine.has_python_headers:
        meaning = "torch.compile fails: Python.h is missing"
        return Check(name, Status.WARN, machine.compiler, meaning, "install python3-dev" + fix_end)
    if has_gpu and torch.cuda_version and not torch.versions.get("triton"):
        why = torch.errors.get("triton", "triton is not installed")
        fix = "reinstall the triton that this torch names" + fix_end
        return Check(name, Status.WARN, f"{machine.compiler}; {why}", "torch.compile fails on GPUs", fix)
    triton = torch.versions.get("triton")
    found = machine.compiler + (f"; triton {triton}" if triton and has_gpu else "")
    return Check(name, Status.OK, found, "torch.compile can build")


_ALLOCATOR_KEYS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_check(environment: Mapping[str, str], *, has_gpu: bool) -> Check:
    """The CUDA allocator's mode: it decides how much more than the active memory is reserved."""
    name = "allocator"
    values = {key: environment[key] for key in _ALLOCATOR_KEYS if environment.get(key)}
    found = ", ".join(f"{key}={value}" for key, value in values.items()) or "default"
    fix = "export PYTORCH_ALLOC_CONF=expandable_segments:True (and nothing in PYTORCH_CUDA_ALLOC_CONF)"
    if not has_gpu:
        return Check(name, Status.OK, found, "no effect on CPU")
    if len(set(values.values())) > 1:
        return Check(name, Status.WARN, found, "the two variables disagree", fix)
    if re.search(r"\bexpandable_segments:\s*True\b", found, re.IGNORECASE):
        return Check(name, Status.OK, found, "expandable segments, as the memory model was measured")
    meaning = (
        "reserved memory is not what the memory model was measured with: more fragmentation, earlier OOM"
    )
    return Check(name, Status.WARN, found, meaning, fix)


# --- the rest of the machine ---------------------------------------------------------------------


def slurm_check(slurm: SlurmFacts) -> Check:
    """Whether this machine can submit to Slurm."""
    if not slurm.commands:
        return Check("Slurm", Status.OK, "none", "probes run on this machine")
    missing = sorted({"sbatch", "squeue", "scancel"} - set(slurm.commands))
    if missing:
        fix = "use a login node"
        return Check("Slurm", Status.WARN, f"no {', '.join(missing)}", "no probes through Slurm", fix)
    if slurm.controller_problem:
        meaning = "the controller does not answer: no probes through Slurm now"
        return Check("Slurm", Status.WARN, slurm.controller_problem, meaning, "scontrol ping")
    if slurm.accounting_problem:
        meaning = "jobs can be submitted; ended ones are seen only while the controller remembers them"
        return Check(
            "Slurm", Status.WARN, slurm.accounting_problem, meaning, "ask for slurmdbd, or poll often"
        )
    return Check("Slurm", Status.OK, slurm.version, "sbatch, squeue and sacct answer")


def disk_check(machine: MachineFacts) -> Check:
    """Room for the folder of runs."""
    found = f"{format_gib(machine.disk_free_bytes)} free in {machine.runs_dir}"
    if not machine.runs_writable:
        return Check("runs folder", Status.FAIL, found, "cannot be written", "use --runs-dir elsewhere")
    if machine.disk_free_bytes < GIB:
        return Check("runs folder", Status.FAIL, found, "too full to run probes", "free space, or --runs-dir")
    if machine.disk_free_bytes < FREE_DISK_BYTES:
        meaning = "compile caches and logs of a long search may not fit"
        return Check("runs folder", Status.WARN, found, meaning, "free space, or --runs-dir")
    return Check("runs folder", Status.OK, found, "enough")


def shared_memory_check(machine: MachineFacts) -> Check:
    """``/dev/shm``, where NCCL and data loaders keep buffers."""
    if machine.shared_memory_bytes is None:
        return Check("/dev/shm", Status.WARN, "none", "NCCL and data loaders may fail", "mount a tmpfs there")
    found = f"{format_gib(machine.shared_memory_bytes)} free"
    if machine.shared_memory_bytes < SHARED_MEMORY_BYTES:
        fix = "docker run --shm-size=16g, or an emptyDir of medium Memory"
        return Check(
            "/dev/shm", Status.WARN, found, "NCCL and data loaders die of SIGBUS when it is full", fix
        )
    return Check("/dev/shm", Status.OK, found, "enough")


def open_files_check(machine: MachineFacts) -> Check:
    """``ulimit -n``, which the processes of a probe inherit."""
    found = f"{machine.open_files:,}"
    if machine.open_files < OPEN_FILES:
        meaning = "ranks, NCCL sockets and compile workers may run out of files"
        return Check("open files", Status.WARN, found, meaning, f"ulimit -n {OPEN_FILES} or more")
    return Check("open files", Status.OK, found, "enough")


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
