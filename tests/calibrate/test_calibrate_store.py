"""Where calibrations are kept, and to which clusters they apply."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_tune.calibrate import store
from titan_tune.calibrate.result import Calibration, Copy, Fingerprint
from titan_tune.catalog.loader import gpu_spec
from titan_tune.cli import run
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError

HERE = Fingerprint(gpu="NVIDIA H100 80GB HBM3", num_gpus=2, driver="580.1", torch="2.11.0+cu130")
CALIBRATION = Calibration(
    fingerprint=HERE,
    created="2026-01-01T00:00:00+00:00",
    seconds=1.0,
    world_size=2,
    backend="nccl",
    copies=(Copy(bytes=10**9, seconds=1e-3),),
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterSpec:
    """A machine with two H100s whose cache folder is empty."""
    cluster = ClusterSpec(gpu=gpu_spec("h100-80gb"), gpus_per_node=2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store, "local_fingerprint", lambda: HERE)
    monkeypatch.setattr(store.machine, "local_cluster", lambda: cluster)
    return cluster


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.json"
    store.save(CALIBRATION, path)
    assert store.load(path) == CALIBRATION
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_cache_path_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = store.cache_path(HERE)
    assert path.parent == tmp_path / "titan-tune" / "calibration"
    assert path.name.startswith("nvidia-h100-80gb-hbm3-x2-")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.cache_path(HERE).is_relative_to(tmp_path / "home" / ".cache")


@pytest.mark.parametrize(
    "change", [{"num_gpus": 4}, {"driver": "581"}, {"torch": "2.12.0"}, {"gpu": "other"}]
)
def test_another_machine_has_another_file(change: dict[str, object]) -> None:
    assert HERE.model_copy(update=change).name != HERE.name


def test_a_calibrated_machine_is_used(machine: ClusterSpec) -> None:
    assert store.calibrated(machine) == machine
    store.save(CALIBRATION, store.cache_path(HERE))
    rates = store.calibrated(machine).rates
    assert rates is not None
    assert rates.copy_gb_per_s == pytest.approx(2000.0)
    larger = ClusterSpec(gpu=gpu_spec("h100-80gb"), num_nodes=4, gpus_per_node=8)
    assert store.calibrated(larger).rates == rates


def test_other_gpus_are_not(machine: ClusterSpec) -> None:
    store.save(CALIBRATION, store.cache_path(HERE))
    assert store.calibrated(ClusterSpec(gpu=gpu_spec("a100"))).rates is None


def test_a_file_of_another_machine_is_not(machine: ClusterSpec) -> None:
    moved = CALIBRATION.model_copy(update={"fingerprint": HERE.model_copy(update={"driver": "570"})})
    store.save(moved, store.cache_path(HERE))
    assert store.calibrated(machine).rates is None


def test_no_torch_no_calibration(machine: ClusterSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(CALIBRATION, store.cache_path(HERE))
    monkeypatch.setattr(store, "local_fingerprint", lambda: None)
    assert store.calibrated(machine) is machine


def test_a_file_of_another_schema_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"schema_version": 2, "anything": True}))
    assert store.load(path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000, b"NaN"])
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        store.load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "titan-tune calibrate" in message
    assert "\n" not in message


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9"])
def test_budget_out_of_range(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--seconds", seconds]) == 2
    assert "--seconds" in capsys.readouterr().err


def test_output_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--output", str(tmp_path)]) == 2
    assert "calibration.json" in capsys.readouterr().err
