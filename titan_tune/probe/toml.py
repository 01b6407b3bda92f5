"""What a probe changes in a job: the torchtitan keys that make it short, quiet and measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from titan_tune.domain.candidate import Value
from titan_tune.domain.probe import ProbeSettings
from titan_tune.errors import InputError
from titan_tune.probe.files import OUTPUTS
from titan_tune.titan.keys import defaults

PLUGIN: Final = "titan_tune.titan.plugin"
PLUGIN_CONFIG: Final = "titan_tune.titan.plugin.config"
SEED: Final = 0


def probe_values(
    job_values: Mapping[str, Value], settings: ProbeSettings, directory: Path, device: str
) -> dict[str, Value]:
    """The keys a probe overrides in a job, dotted as torchtitan has them.

    ``job_values`` are the job's own keys; ``directory`` is the trial folder; ``device`` is ``cuda`` or
    ``cpu``. Everything that decides speed, memory or numerics stays the job's, the learning-rate schedule
    included: it is computed for the job's steps, not the probe's, unless these are more.
    Raises InputError where the job brings a ``job.custom_config_module`` of its own.
    """
    _check(job_values, settings, device)
    job = {**defaults(), **job_values}
    values: dict[str, Value] = {
        "job.dump_folder": str(directory / OUTPUTS),
        "job.custom_config_module": PLUGIN_CONFIG,
        "experimental.custom_import": PLUGIN,
        "training.steps": settings.steps,
        # beyond the end of its schedule torchtitan fails, or trains with a negative learning rate
        "lr_scheduler.total_steps": max(
            job["lr_scheduler.total_steps"] or job["training.steps"], settings.steps
        ),
        "metrics.log_freq": 1,
        "metrics.disable_color_printing": True,
        "metrics.enable_tensorboard": False,
        "metrics.enable_wandb": False,
        "profiling.enable_profiling": False,
        "profiling.enable_memory_snapshot": False,
        "checkpoint.enable": False,
        "checkpoint.create_seed_checkpoint": False,
        "validation.enable": False,
        # step 1, cold compilation included, runs under this limit
        "comm.init_timeout_seconds": max(
            job["comm.init_timeout_seconds"], math.ceil(settings.startup_seconds)
        ),
        "titan_tune.data": settings.data,
    }
    if job["debug.seed"] is None:
        # the same initial weights in every probe: losses differ by layout and numerics, not by chance
        values["debug.seed"] = SEED
    own_import = job["experimental.custom_import"]
    if own_import and own_import != PLUGIN:
        values["titan_tune.custom_import"] = own_import
    if job["job.save_config_file"]:
        values["job.save_config_file"] = None  # a probe must not write over the user's file
    return values


def _check(job_values: Mapping[str, Value], settings: ProbeSettings, device: str) -> None:
    module = job_values.get("job.custom_config_module")
    if module and module != PLUGIN_CONFIG:
        raise InputError(
            f"job.custom_config_module={module!r}: torchtitan loads one such module and a probe needs "
            f"{PLUGIN_CONFIG!r}; unset it for the search"
        )
    if device not in ("cuda", "cpu"):
        raise InputError(f"device={device!r} is not one of cuda, cpu")
    check_steps(settings)


def check_steps(settings: ProbeSettings) -> None:
    """Raise InputError where a probe would measure no step."""
    if settings.warmup_steps >= settings.steps:
        raise InputError(
            f"[probe] warmup_steps={settings.warmup_steps} leaves nothing to measure of steps={settings.steps}; "
            f"at most {settings.steps - 1}"
        )
