from __future__ import annotations

import dataclasses
import io
import json
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from titan_tune.cli import doctor as command
from titan_tune.doctor import Check, Status, all_checks
from titan_tune.doctor_facts import (
    Gpu,
    GpuFacts,
    MachineFacts,
    SlurmFacts,
    TorchFacts,
    answer,
    read_gpus,
    read_machine,
    read_slurm,
    read_torch,
    torch_facts,
)
from titan_tune.units import GIB, MIB

VERSIONS = {
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "torchao": "0.17.0",
    "torchtitan": "0.2.2",
    "optuna": "5.0.0",
}
TORCH = TorchFacts(
    versions=VERSIONS, cuda_version="13.0", num_devices=2, nccl_version="2.28.9", peer_access=True
)
CPU_TORCH = TorchFacts(versions={**VERSIONS, "torch": "2.13.0+cpu"})
H200 = Gpu(0, "NVIDIA H200", 140 * GIB, 600 * MIB, (9, 0))
GPUS = GpuFacts((H200, dataclasses.replace(H200, index=1)), "580.82", "13.0", nvlinks=18)
NO_GPUS = GpuFacts(problem="none (NVML Shared Library Not Found)")
MACHINE = MachineFacts(
    python=(3, 11, 7),
    compiler="g++ 12.2.0",
    environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    disk_free_bytes=500 * GIB,
    shared_memory_bytes=64 * GIB,
    open_files=65536,
)
SLURM = SlurmFacts(("sbatch", "squeue", "scancel", "sacct", "scontrol"), "slurm 23.11")


def by_name(
    torch: TorchFacts = TORCH, gpus: GpuFacts = GPUS, slurm: SlurmFacts = SLURM, **machine: object
) -> dict[str, Check]:
    facts = dataclasses.replace(MACHINE, **machine)  # type: ignore[arg-type]
    return {check.name: check for check in all_checks(torch, gpus, slurm, facts)}


def test_a_good_gpu_machine_has_no_complaint() -> None:
    checks = by_name()
    assert {check.status for check in checks.values()} == {Status.OK}
    assert "works" in checks["float8"].meaning
    assert "works" in checks["grouped mm"].meaning
    assert "needs SM 10.0" in checks["mxfp8"].meaning


def test_a_machine_without_a_gpu_is_fine() -> None:
    checks = by_name(CPU_TORCH, NO_GPUS, SlurmFacts(), environment={})
    assert {check.status for check in checks.values()} == {Status.OK}
    assert "CPU processes" in checks["GPU"].meaning
    assert "float8" not in checks
    assert "NCCL" not in checks


def with_gpu(**changes: object) -> GpuFacts:
    return dataclasses.replace(GPUS, gpus=(H200, dataclasses.replace(H200, index=1, **changes)))  # type: ignore[arg-type]


TROUBLE = [
    (
        "torch",
        Status.FAIL,
        {"torch": TorchFacts(problem="importing torch crashed (SIGSEGV)")},
        "cannot start",
    ),
    ("torch", Status.FAIL, {"torch": TorchFacts({**VERSIONS, "torch": "2.4.0"}, num_devices=2)}, "too old"),
    (
        "torch",
        Status.WARN,
        {"torch": TorchFacts({**VERSIONS, "torch": "2.14.0"}, num_devices=2)},
        "not tested",
    ),
    ("torchtitan", Status.FAIL, {"torch": TorchFacts({**VERSIONS, "torchtitan": "0.3.0"})}, "0.2.2"),
    (
        "torchtitan",
        Status.FAIL,
        {"torch": TorchFacts(VERSIONS, {"torchtitan": "No module named 'triton'"})},
        "estimates work",
    ),
    ("torchao", Status.WARN, {"torch": TorchFacts({**VERSIONS, "torchao": "0.18.0"})}, "not tested"),
    ("optuna", Status.FAIL, {"torch": TorchFacts({**VERSIONS, "optuna": "4.9.0"})}, "too old"),
    ("Python", Status.FAIL, {"python": (3, 10, 1)}, "too old"),
    ("Python", Status.WARN, {"python": (3, 14, 0)}, "not tested"),
    ("GPU", Status.WARN, {"torch": CPU_TORCH}, "CPU build"),
    (
        "GPU",
        Status.FAIL,
        {"torch": dataclasses.replace(TORCH, num_devices=0, cuda_problem="driver too old")},
        "driver too old",
    ),
    ("GPU", Status.WARN, {"gpus": with_gpu(name="NVIDIA H100")}, "slowest decides"),
    (
        "GPU",
        Status.WARN,
        {"torch": dataclasses.replace(TORCH, hip_version="7.0"), "gpus": NO_GPUS},
        "not checked",
    ),
    ("GPU state", Status.WARN, {"gpus": with_gpu(used_bytes=40 * GIB)}, "others"),
    ("GPU state", Status.WARN, {"gpus": with_gpu(mig=True)}, "slice"),
    ("GPU state", Status.WARN, {"gpus": with_gpu(ecc_errors=3)}, "may be wrong"),
    ("NCCL", Status.WARN, {"torch": dataclasses.replace(TORCH, nccl_version="")}, "no NCCL"),
    ("links", Status.WARN, {"torch": dataclasses.replace(TORCH, peer_access=False)}, "no peer access"),
    ("links", Status.WARN, {"gpus": dataclasses.replace(GPUS, nvlinks=0)}, "calibrate"),
    (
        "compiler",
        Status.WARN,
        {"compiler": "", "compiler_problem": "neither g++ nor clang++"},
        "no C++ compiler",
    ),
    ("compiler", Status.WARN, {"has_python_headers": False}, "Python.h"),
    (
        "compiler",
        Status.WARN,
        {"torch": dataclasses.replace(TORCH, versions={k: v for k, v in VERSIONS.items() if k != "triton"})},
        "GPUs",
    ),
    ("allocator", Status.WARN, {"environment": {}}, "fragmentation"),
    (
        "allocator",
        Status.WARN,
        {"environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}},
        "fragmentation",
    ),
    (
        "allocator",
        Status.WARN,
        {
            "environment": {
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
            }
        },
        "disagree",
    ),
    ("Slurm", Status.WARN, {"slurm": SlurmFacts(("squeue",), "slurm 23.11")}, "no probes through Slurm"),
    (
        "Slurm",
        Status.WARN,
        {"slurm": dataclasses.replace(SLURM, controller_problem="squeue did not answer within 10 s")},
        "does not answer",
    ),
    (
        "Slurm",
        Status.WARN,
        {"slurm": dataclasses.replace(SLURM, accounting_problem="Slurm accounting storage is disabled")},
        "remembers",
    ),
    ("runs folder", Status.FAIL, {"disk_free_bytes": 100 * MIB}, "too full"),
    ("runs folder", Status.WARN, {"disk_free_bytes": 4 * GIB}, "may not fit"),
    ("runs folder", Status.FAIL, {"runs_writable": False}, "cannot be written"),
    ("/dev/shm", Status.WARN, {"shared_memory_bytes": 64 * MIB}, "SIGBUS"),
    ("/dev/shm", Status.WARN, {"shared_memory_bytes": None}, "may fail"),
    ("open files", Status.WARN, {"open_files": 256}, "run out of files"),
]


@pytest.mark.parametrize(("name", "status", "changes", "says"), TROUBLE)
def test_trouble(name: str, status: Status, changes: dict, says: str) -> None:
    check = by_name(**changes)[name]
    assert check.status is status
    assert says in check.meaning
    assert check.fix or name == "Python"


def test_older_gpus() -> None:
    checks = by_name(gpus=with_gpu(capability=(8, 0)))
    assert "needs SM 8.9" in checks["float8"].meaning, "the smallest capability decides"
    assert "one after the other" in checks["grouped mm"].meaning


@pytest.mark.parametrize(
    "value",
    [
        "expandable_segments:True",
        "max_split_size_mb:512,expandable_segments:true",
        "expandable_segments: True",
    ],
)
def test_expandable_segments_in_any_spelling(value: str) -> None:
    assert by_name(environment={"PYTORCH_CUDA_ALLOC_CONF": value})["allocator"].status is Status.OK


@given(
    st.dictionaries(st.sampled_from(["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]), st.text(max_size=40))
)
def test_no_allocator_setting_raises(environment: dict[str, str]) -> None:
    by_name(environment=environment)


VERSION_TEXTS = st.one_of(
    st.text(max_size=12), st.from_regex(r"\d{1,3}\.\d{1,3}(\.\d)?(\+\w+)?", fullmatch=True)
)


@given(
    st.dictionaries(st.sampled_from([*VERSIONS]), VERSION_TEXTS),
    st.dictionaries(st.sampled_from([*VERSIONS]), st.text()),
)
def test_no_version_raises(versions: dict[str, str], errors: dict[str, str]) -> None:
    by_name(TorchFacts(versions, errors))


# --- readers -------------------------------------------------------------------------------------


def test_a_torch_that_crashes_is_survived(tmp_path: Path) -> None:
    for body, says in (
        ("kill -SEGV $$", "crashed (SIGSEGV)"),
        ("echo oops >&2; exit 3", "ended with code 3: oops"),
        ("sleep 60", "took more than 0.5 s"),
    ):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(stat.S_IRWXU)
        assert says in read_torch(0.5 if "sleep" in body else 30, python=str(python)).problem
    assert "No such file" in read_torch(30, python=str(tmp_path / "none")).problem


def test_what_libraries_print_beside_the_facts_does_no_harm() -> None:
    text = f"banner\n{doctor_line({'versions': VERSIONS, 'errors': {}, 'num_devices': 2})}\nbye"
    assert torch_facts(text, "warnings", 0) == TorchFacts(VERSIONS, {}, num_devices=2)


def doctor_line(facts: dict) -> str:
    return "titan-tune-doctor:" + json.dumps(facts)


@pytest.mark.torchtitan
def test_the_torch_of_this_machine() -> None:
    facts = read_torch(300)
    assert facts.problem == ""
    assert facts.errors == {}
    assert set(facts.versions) == {"torch", "triton", "torchao", "torchtitan", "optuna"}
    assert facts.cuda_version or facts.hip_version or facts.num_devices == 0


class FakeNvml(SimpleNamespace):
    """The part of pynvml that the doctor calls, for two GPUs of which the second has fewer links."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__(
            NVML_NVLINK_MAX_LINKS=4,
            NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
            NVML_VOLATILE_ECC=0,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlSystemGetCudaDriverVersion=lambda: 13020,
            nvmlSystemGetDriverVersion=lambda: b"580.82",
            nvmlDeviceGetName=lambda handle: "NVIDIA H200",
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=140 * GIB, used=GIB * (handle + 1)),
            nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
            nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: handle * 5,
        )
        self.broken = broken

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link == 3:
            raise self.NVMLError("Invalid Argument")
        return int(link < 3 - handle)


def test_gpus_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    facts = read_gpus()
    assert facts == GpuFacts(
        (
            Gpu(0, "NVIDIA H200", 140 * GIB, GIB, (9, 0)),
            Gpu(1, "NVIDIA H200", 140 * GIB, 2 * GIB, (9, 0), ecc_errors=5),
        ),
        "580.82",
        "13.2",
        nvlinks=2,
    )


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=True))
    assert read_gpus() == GpuFacts(problem="none (NVML Shared Library Not Found)")


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(stat.S_IRWXU)
    # nothing else of PATH: this machine may have a real Slurm
    (folder / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(folder))


def test_slurm_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm(tmp_path, monkeypatch, sbatch="", scancel="", sacct="exit 0", squeue="echo slurm 23.11.4")
    assert read_slurm() == SlurmFacts(("sbatch", "squeue", "scancel", "sacct"), "slurm 23.11.4")


def test_slurm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = "Unable to contact slurm controller (connect failure)"
    fake_slurm(
        tmp_path,
        monkeypatch,
        sbatch="",
        scancel="",
        squeue=f'[ "$1" = --version ] && echo slurm 23.11.4 && exit 0; echo "{down}" >&2; exit 1',
        sacct='echo "Slurm accounting storage is disabled" >&2; exit 1',
    )
    facts = read_slurm()
    assert (facts.version, facts.controller_problem) == ("slurm 23.11.4", down)
    assert facts.accounting_problem == "Slurm accounting storage is disabled"


def test_a_command_that_hangs_is_given_up() -> None:
    assert answer(["sleep", "60"], seconds=0.1) == ("", "sleep did not answer within 0.1 s")
    assert answer(["no-such-command-here"]) == ("", "no-such-command-here: No such file or directory")


def test_the_machine_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = read_machine(tmp_path / "runs" / "of" / "nobody")
    assert facts.python == sys.version_info[:3]
    assert facts.runs_writable
    assert facts.disk_free_bytes > 0
    assert facts.open_files > 0
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    facts = read_machine(tmp_path)
    assert (facts.compiler, facts.compiler_problem) == ("", f"CXX={tmp_path / 'g++'} is not there")


def test_a_file_in_the_way_of_the_runs_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert not read_machine(tmp_path / "runs").runs_writable


# --- the command ---------------------------------------------------------------------------------


def run(
    monkeypatch: pytest.MonkeyPatch, checks: dict[str, Check], *, as_json: bool = False
) -> tuple[int, str]:
    monkeypatch.setattr(command, "checks", lambda: tuple(checks.values()))
    output = io.StringIO()
    return command.run_doctor(as_json=as_json, console=Console(file=output, width=120)), output.getvalue()


def test_exit_codes_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(monkeypatch, by_name())
    assert code == 0
    assert text.endswith("probes can run here\n")
    code, text = run(monkeypatch, by_name(open_files=256))
    assert code == 0
    assert "1 warning(s)" in text
    code, text = run(monkeypatch, by_name(TorchFacts(problem="importing torch crashed (SIGILL)")))
    assert code == 4
    assert "importing torch crashed (SIGILL)" in text
    assert "fix: pip install 'titan-tune[probe]'" in text


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(monkeypatch, by_name(disk_free_bytes=0), as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert code == 4
    assert values["schema"] == 1
    assert values["probes_can_run"] is False
    disk = next(check for check in values["checks"] if check["name"] == "runs folder")
    assert set(disk) == {"name", "status", "found", "meaning", "fix"}
    assert disk["status"] == "fail"


def test_nothing_heavy_is_imported() -> None:
    """The doctor must survive a torch whose import crashes; the diagnosis must start quickly."""
    modules = "titan_tune.cli.doctor, titan_tune.cli.diagnose"
    heavy = "{'torch', 'torchtitan', 'torchao', 'optuna', 'pynvml', 'numpy', 'rich'}"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
