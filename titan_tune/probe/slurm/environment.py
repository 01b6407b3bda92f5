"""Which variables a job gets. Pure.

sbatch hands the caller's whole environment to the job by default: passwords included, and whatever happens to be set
in one terminal. Here what is needed to find programs and libraries is passed on, what decides how a probe runs is
written into the script, and ``[slurm] setup`` is for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from titan_tune.domain.probe import ProbeSpec
from titan_tune.probe.launch import probe_environment
from titan_tune.probe.slurm.settings import SlurmSettings
from titan_tune.titan.plugin import environment as plugin

_PASSED: Final = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH",
    "PYTHONPATH", "VIRTUAL_ENV", "MODULEPATH", "MODULESHOME", "LOADEDMODULES", "SLURM_CONF", "SLURM_CLUSTERS",
))  # fmt: skip
_PASSED_PREFIXES: Final = ("LC_", "CONDA_", "MAMBA_", "MODULES_", "LMOD_", "BASH_FUNC_")
_PROBE_PREFIXES: Final = (
    "PYTORCH_", "TORCH", "TRITON_", "CUDA_", "NCCL_", "GLOO_", "OMP_", "HIP_", "ROCR_", "HF_", "UCX_", "FI_", "OFI_",
)  # fmt: skip
"""What decides how ranks run: libraries' own settings."""
_SITE_FIELDS: Final = ("partition", "account", "qos", "constraint", "reservation")
"""What users set as SBATCH_PARTITION and the like. Of sbatch's variables no other: they override the script."""
_DEVICES: Final = frozenset(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
"""Slurm's to set."""
_SECRET: Final = re.compile(r"TOKEN|PASS|SECRET|CREDENTIAL|PRIVATE|API_?KEY", re.IGNORECASE)


def submission_environment(
    inherited: Mapping[str, str], settings: SlurmSettings | None = None
) -> dict[str, str]:
    """The caller's variables that sbatch may see and pass on to a job; what ``settings`` name is not the caller's."""
    site = {f"SBATCH_{name.upper()}" for name in _SITE_FIELDS if getattr(settings, name, None) is None}
    return {
        name: value
        for name, value in inherited.items()
        if (name in _PASSED or name in site or name.startswith(_PASSED_PREFIXES) or _decides(name))
        and not _SECRET.search(name)
    }


def command_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """For Slurm's own commands: no format, filter or allocation of the caller's that would change their output."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    prefixes = ("SLURM_", "SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_")
    return {k: v for k, v in inherited.items() if k in kept or not k.startswith(prefixes)}


def script_environment(spec: ProbeSpec, probe_id: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that a probe's script exports: what a probe needs, and the caller's that decide how it runs.

    The cache folder is not among them: it is the script's own to make.
    """
    passed = submission_environment(inherited)
    wanted = probe_environment(spec, probe_id, passed)
    return {
        name: value
        for name, value in wanted.items()
        if (passed.get(name) != value or _decides(name)) and name != plugin.CACHE_DIR
    }


def step_environment(spec: ProbeSpec, probe_id: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that a step's script exports over the allocation's environment, which it runs in."""
    wanted = probe_environment(spec, probe_id, inherited)
    return {
        name: value
        for name, value in wanted.items()
        if inherited.get(name) != value and name != plugin.CACHE_DIR
    }


def unmarked(environment: Mapping[str, str]) -> dict[str, str]:
    """For a run by hand: without the probe's mark and folder, so that it does not write over what was measured."""
    return {k: v for k, v in environment.items() if k not in (plugin.PROBE_ID, plugin.METRICS_DIR)}


def _decides(name: str) -> bool:
    return name.startswith(_PROBE_PREFIXES) and name not in _DEVICES
