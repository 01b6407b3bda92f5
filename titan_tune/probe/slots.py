"""Several probes side by side on one machine, each on GPUs of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from titan_tune.domain.probe import ProbeSpec
from titan_tune.probe.runner import ProbeHandle, Runner

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class SlicedRunner:
    """A local runner with one slot a set of devices. Probes side by side share the machine's processors, memory
    bandwidth and power: they measure less well than alone."""

    def __init__(self, runner: Runner, devices: Sequence[str | None]) -> None:
        """``devices`` is a slot's ``CUDA_VISIBLE_DEVICES``, or ``None`` where a slot has no devices (CPU)."""
        self.name = runner.name
        self.slots = len(devices)
        self._runner, self._devices = runner, tuple(devices)
        self._handles: list[ProbeHandle | None] = [None] * len(devices)

    def start(self, spec: ProbeSpec) -> ProbeHandle:
        """Launch the probe on the first free slot."""
        slot = self._free()
        devices = self._devices[slot]
        if devices is not None:
            spec = replace(spec, environment=(*spec.environment, (VISIBLE_DEVICES, devices)))
        handle = self._runner.start(spec)
        self._handles[slot] = handle
        return handle

    def _free(self) -> int:
        for slot, handle in enumerate(self._handles):
            if handle is None or handle.poll() is not None:
                return slot
        raise RuntimeError(f"all {self.slots} slots are taken")

    def close(self) -> None:
        """Cancel and reap everything started here."""
        self._runner.close()


def visible_devices(count: int) -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` names, or all ``count`` devices of the machine."""
    given = os.environ.get(VISIBLE_DEVICES)
    return given.split(",") if given else [str(index) for index in range(count)]


def device_slices(visible: Sequence[str], *, per_probe: int, slots: int) -> tuple[str, ...]:
    """``slots`` values of ``CUDA_VISIBLE_DEVICES``, disjoint, ``per_probe`` devices each.

    Raises ValueError when there are too few.
    """
    if per_probe * slots > len(visible):
        raise ValueError(
            f"{slots} probes of {per_probe} GPUs need {per_probe * slots}, there are {len(visible)}"
        )
    return tuple(",".join(visible[i * per_probe : (i + 1) * per_probe]) for i in range(slots))
