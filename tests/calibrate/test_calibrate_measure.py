"""Real measurements on the processor, and what happens where they cannot be made."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from titan_tune.calibrate import CalibrationOptions, Fingerprint, local_fingerprint, measure, store
from titan_tune.cli import run
from titan_tune.errors import ProbesFailedError
from titan_tune.estimate.collectives import Op

CPU = Fingerprint(gpu="cpu", num_gpus=2, driver="", torch="any")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.torchtitan
def test_two_processes_measure_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = children()
    copy = tmp_path / "copy.json"
    assert run(["calibrate", "--seconds", "60", "--output", str(copy), "--json"]) == 0
    assert children() <= before
    printed = json.loads(capsys.readouterr().out)
    fingerprint = local_fingerprint()
    assert fingerprint is not None
    kept = store.load(store.cache_path(fingerprint))
    assert kept is not None
    assert kept == store.load(copy)
    assert kept.model_dump(mode="json") == printed
    assert kept.world_size == 2
    assert kept.backend == "gloo"
    assert {matmul.kind for matmul in kept.matmuls} == {"bfloat16", "float32"}
    assert {Op.ALL_GATHER, Op.ALL_REDUCE} <= {time.op for time in kept.collectives}
    assert kept.attention
    assert kept.copies
    assert kept.launch_seconds


@pytest.mark.torchtitan
def test_where_there_is_no_gpu_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = children()
    with pytest.raises(ProbesFailedError, match=r"calibration failed: .*(CUDA|cuda|NVIDIA)"):
        measure(CalibrationOptions("cuda", 1, 1.0), CPU)
    assert children() <= before


@pytest.mark.torchtitan
def test_interrupted_it_leaves_no_process() -> None:
    before = children()
    started: set[int] = set()

    def interrupt(seconds: float) -> None:
        started.update(children() - before)
        if started:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(CalibrationOptions("cpu", 2, 30.0), CPU, on_wait=interrupt)
    assert started
    assert children() <= before
