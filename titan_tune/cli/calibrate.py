"""``titan-tune calibrate``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from titan_tune.calibrate import (
    Calibration,
    CalibrationOptions,
    Fingerprint,
    cache_path,
    local_fingerprint,
    measure,
    rates_of,
    save,
)
from titan_tune.cli import interrupt_on_terminate
from titan_tune.domain.calibration import MeasuredRates
from titan_tune.errors import InputError
from titan_tune.units import MIB

if TYPE_CHECKING:
    from rich.console import Console

LEAST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 3600.0


def run_calibrate(*, seconds: float, output: Path | None, as_json: bool, console: Console) -> int:
    """Measure this machine, keep the result in the cache folder (and in ``output``), print it; exit code 0.

    Raises:
        InputError: torch is not installed, a budget out of range, or ``output`` is a folder.
        ProbesFailedError: the measuring processes failed.
    """
    fingerprint = _fingerprint()
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise InputError(f"--seconds: {seconds:g} is not from {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    if output is not None and output.is_dir():
        raise InputError(
            f"--output: {output} is a folder; give the name of a file, e.g. {output / 'calibration.json'}"
        )
    device = "cpu" if fingerprint.gpu == "cpu" else "cuda"
    calibration = _measure(CalibrationOptions(device, fingerprint.num_gpus, seconds), fingerprint)
    path = cache_path(fingerprint)
    for target in (path, output):
        if target is not None:
            save(calibration, target)
    if as_json:
        print(json.dumps(calibration.model_dump(mode="json"), indent=1))
    else:
        _print(calibration, rates_of(calibration), path, console)
    return 0


def _fingerprint() -> Fingerprint:
    fingerprint = local_fingerprint()
    if fingerprint is None or importlib.util.find_spec("torch") is None:
        raise InputError(
            "calibrate measures with torch, which is not installed: pip install 'titan-tune[probe]'"
        )
    return fingerprint


def _measure(options: CalibrationOptions, fingerprint: Fingerprint) -> Calibration:
    from titan_tune.cli.console import stderr_console

    what = f"{options.num_ranks} {'processes on the CPU' if options.device == 'cpu' else 'GPU(s)'}"
    interrupt_on_terminate()
    with stderr_console().status(f"measuring {what}") as status:

        def on_wait(passed: float) -> None:
            status.update(f"measuring {what}: {passed:.0f} s of {options.seconds:.0f} s and start-up")

        return measure(options, fingerprint, on_wait=on_wait)


def _print(calibration: Calibration, rates: MeasuredRates, path: Path, console: Console) -> None:
    from rich.table import Table

    where = calibration.fingerprint
    backend = f"{calibration.backend} {calibration.nccl}" if calibration.nccl else calibration.backend
    console.print(f"{where.gpu} x {calibration.world_size}, torch {where.torch}, {backend}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("measured", "rate", ""):
        table.add_column(heading)
    for name, rate, note in _rows(calibration, rates):
        table.add_row(name, rate, note)
    console.print(table)
    for problem in calibration.not_measured:
        console.print(f"not measured: {problem}", style="dim", highlight=False, soft_wrap=True)
    console.print(
        f"kept in {path}: estimate and search use it on this machine", highlight=False, soft_wrap=True
    )


def _rows(calibration: Calibration, rates: MeasuredRates) -> list[tuple[str, str, str]]:
    tflops = (
        ("matmul bf16", rates.matmul_tflops, "forward and backward"),
        ("matmul float32", rates.float32_tflops, "forward and backward"),
        ("matmul float8 tensorwise", rates.float8_tensorwise_tflops, "casts apart"),
        ("matmul float8 rowwise", rates.float8_rowwise_tflops, "casts apart"),
        ("attention bf16", rates.attention_tflops, "causal, forward and backward"),
    )
    rows = [(name, f"{rate:,.4g} TFLOP/s", note) for name, rate, note in tflops if rate]
    if rates.copy_gb_per_s:
        rows.append(("copy", f"{rates.copy_gb_per_s:,.4g} GB/s", "read and written"))
    if calibration.launch_seconds:
        launch = f"{1e6 * calibration.launch_seconds:.1f} µs"
        rows.append(("operator", launch, "host time of a small one, eager; for comparing machines"))
    for link in rates.links:
        sizes = [time.bytes for time in calibration.collectives if time.op == link.op]
        note = (
            f"bus bandwidth, {link.latency_seconds * 1e6:.0f} µs a step; "
            f"{min(sizes) / MIB:g} to {max(sizes) / MIB:g} MiB"
        )
        rows.append((link.op.replace("_", "-"), f"{link.gb_per_s:,.4g} GB/s", note))
    return rows
