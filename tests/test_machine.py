"""The local machine, against a driver that is played by a fake pynvml."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from titan_tune import machine
from titan_tune.catalog.loader import gpu_spec
from titan_tune.machine import NvidiaGpu, NvidiaMachine
from titan_tune.units import GIB

# H200, driver 580.159: nvidia-smi total and reserved in MiB; torch reports their difference to the byte
H200_TOTAL, H200_RESERVED = 143771 * 2**20, 143771 * 2**20 - 150109880320


class FakeDriver:
    """As much of pynvml as machine.py uses."""

    NVMLError = RuntimeError
    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self, *gpus: tuple[str, int, int, tuple[int, int]], knows_v2: bool = True, broken: str = ""):
        self.gpus, self.knows_v2, self.broken, self.is_open = gpus, knows_v2, broken, False

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}abc-def",
            "nvmlDeviceGetName": lambda index: self.gpus[index][0],
            "nvmlDeviceGetCudaComputeCapability": lambda index: self.gpus[index][3],
            "nvmlSystemGetDriverVersion": lambda: "580.159.04",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        }
        if name == self.broken:
            raise self.NVMLError("driver/library version mismatch")
        return answers[name]

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken == "nvmlInit":
            raise self.NVMLError("not found")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetMemoryInfo(self, index: int, version: int | None = None) -> SimpleNamespace:  # noqa: N802
        _, total, reserved, _ = self.gpus[index]
        if version is None:
            return SimpleNamespace(total=total)
        if not self.knows_v2:
            raise self.NVMLError("function not found")
        return SimpleNamespace(total=total, reserved=reserved)


H200 = ("NVIDIA H200", H200_TOTAL, H200_RESERVED, (9, 0))


def install(monkeypatch: pytest.MonkeyPatch, driver: Any, visible: str | None = None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_gpus_have_catalogue_rates_and_driver_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(H200, H200)
    install(monkeypatch, driver)
    cluster = machine.local_cluster()
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.world_size) == (1, 2, 2)
    assert cluster.gpu.name == "h200"
    assert cluster.gpu.memory_gib == 150109880320 / GIB
    assert cluster.gpu.bf16_tflops == gpu_spec("h200").bf16_tflops
    assert not driver.is_open


def test_old_driver_without_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(H200, knows_v2=False))
    assert machine.local_cluster().gpu.memory_gib == H200_TOTAL / GIB


def test_unknown_card_takes_the_nearest_rates_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(("NVIDIA H20", 96 * GIB, GIB, (9, 0))))
    gpu = machine.local_cluster().gpu
    assert gpu.name == "NVIDIA H20"
    assert gpu.memory_gib == 95
    assert "h100-96gb" in gpu.source
    assert "NVIDIA H20 is not in the catalogue" in gpu.source


def test_mixed_cards_count_as_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(H200, ("NVIDIA A100-SXM4-40GB", 40 * GIB, GIB, (8, 0))))
    cluster = machine.local_cluster()
    assert (cluster.gpu.name, cluster.gpus_per_node) == ("a100-40gb", 2)


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_broken_driver_means_cpu(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    install(monkeypatch, FakeDriver(H200, broken=broken))
    assert machine.local_cluster().gpu.is_cpu
    assert machine.environment()["gpu"] is None


def test_missing_package_means_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)  # None in sys.modules makes the import fail
    assert machine.nvidia_machine() == NvidiaMachine()
    assert machine.local_cluster().gpu.is_cpu


# device counts that CUDA showed for the same text: H200, driver 580.159, one GPU
@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),
        ("0,0", []),
        ("GPU-1a", [1]),
        ("GPU-", []),
        (" 1 , GPU-2abc-def", [1, 2]),
    ],
)
def test_visible_devices(selection: str | None, expected: list[int]) -> None:
    uuids = ["GPU-0abc-def", "GPU-1abc-def", "GPU-2abc-def"]
    assert machine.visible_devices(selection, uuids) == expected


def test_hidden_gpus_mean_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(H200), visible="")
    assert machine.local_cluster().gpu.is_cpu


def test_cpu_is_divided_among_its_processes() -> None:
    import psutil

    total_gib = psutil.virtual_memory().total / GIB
    one, four = machine.cpu_spec(1), machine.cpu_spec(4)
    assert one.is_cpu
    assert one.compute_capability is None
    assert one.memory_gib <= total_gib
    assert four.memory_gib <= total_gib / 4
    assert four.bf16_tflops == pytest.approx(one.bf16_tflops / 4, rel=0.5)


def test_cpu_cluster_has_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    assert machine.local_cluster().gpus_per_node == machine.CPU_PROCESSES == 2


def test_gpu_from_driver_keeps_the_known_source() -> None:
    gpu = NvidiaGpu("NVIDIA H100 80GB HBM3", 84929937408, (9, 0))
    assert machine.gpu_from_driver(gpu).source == gpu_spec("h100").source


def test_environment_is_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(H200, H200))
    found = json.loads(json.dumps(machine.environment()))
    assert found["gpu"] == "NVIDIA H200"
    assert (found["num_gpus"], found["driver"], found["cuda"]) == (2, "580.159.04", "13.0")
    assert found["packages"]["titan-tune"]
    assert found["python"] == sys.version.split()[0]
    monkeypatch.setattr(machine, "PACKAGES", ("no-such-package",))
    assert machine.environment()["packages"] == {"no-such-package": None}


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from titan_tune import machine; machine.local_cluster(); machine.environment(); "
        "from titan_tune.titan.settings import resolve; "
        "print([m for m in ('torch', 'torchtitan', 'optuna', 'tomlkit') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
