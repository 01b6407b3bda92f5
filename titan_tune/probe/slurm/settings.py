"""The ``[slurm]`` table of a space file: how this site's jobs are submitted.

Two fields are shell by their nature, ``setup`` and, less so, ``extra_sbatch_lines``; everything else is data and
reaches no shell unquoted.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, PositiveFloat, PositiveInt

from titan_tune.domain.base import FrozenModel

OWN_OPTIONS: Final = frozenset((
    "a", "array", "D", "chdir", "e", "error", "export", "J", "job-name", "N", "nodes", "n", "ntasks",
    "ntasks-per-node", "o", "output", "parsable", "requeue", "no-requeue", "t", "time", "wait", "W", "wrap",
    "h", "help", "usage", "V", "version", "test-only",
))  # fmt: skip
"""sbatch options that the runner sets itself, or that would make a submission something else."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_NODE_LIST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]*")
_OPTION: Final = re.compile(r"--?([A-Za-z][A-Za-z0-9-]*)")
_TIME: Final = re.compile(
    r"(?:(?P<days>\d+)-(?P<dhours>\d+)(?::(?P<dminutes>\d+)(?::(?P<dseconds>\d+))?)?"
    r"|(?:(?P<hours>\d+):(?=\d+:))?(?P<minutes>\d+)(?::(?P<seconds>\d+))?)"
)


def _one_line(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    if _CONTROL.search(text):
        raise ValueError("must be one line without control characters")
    return text


def _node_list(text: str) -> str:
    if not _NODE_LIST.fullmatch(text):
        raise ValueError("must be node names as Slurm writes them, such as node7 or node[3-5]")
    return text


def _sbatch_option(line: str) -> str:
    """``--option=value``, with or without ``#SBATCH`` before it."""
    text = line.strip().removeprefix("#SBATCH").strip()
    match = _OPTION.match(text)
    if match is None:
        raise ValueError("must be an sbatch option such as --comment=tuning")
    # -J2 and -JX are one option, J, with a value
    name = match[1] if text.startswith("--") else match[1][0]
    if name in OWN_OPTIONS:
        raise ValueError(f"titan-tune sets {'--' if len(name) > 1 else '-'}{name} itself")
    return text


def slurm_minutes(text: str) -> int:
    """Slurm's time formats in whole minutes, rounded up: 90, 90:00, 1:30:00, 1-12, 1-12:30, 1-12:30:00.

    Raises ValueError for anything else and for no time at all.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a Slurm time: minutes, hours:minutes:seconds or days-hours:minutes")
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    hours = part["days"] * 24 + part["dhours"] + part["hours"]
    seconds = part["dseconds"] + part["seconds"]
    minutes = hours * 60 + part["dminutes"] + part["minutes"] + -(-seconds // 60)
    if minutes == 0:
        raise ValueError("must be at least a minute")
    return minutes


def _time(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _checked_time(text: str) -> str:
    slurm_minutes(text)
    return text


def _from_list(value: object) -> object:
    """TOML has lists; the models are strict and hold tuples."""
    return tuple(value) if isinstance(value, list) else value


Line = Annotated[str, AfterValidator(_one_line)]
Lines = Annotated[tuple[Line, ...], BeforeValidator(_from_list)]
NodeLists = Annotated[tuple[Annotated[str, AfterValidator(_node_list)], ...], BeforeValidator(_from_list)]
SbatchOption = Annotated[str, AfterValidator(_one_line), AfterValidator(_sbatch_option)]
SbatchOptions = Annotated[tuple[SbatchOption, ...], BeforeValidator(_from_list)]
SlurmTime = Annotated[str, BeforeValidator(_time), AfterValidator(_checked_time)]


class Container(FrozenModel):
    """``[slurm.container]``: the image that every task of a job runs in."""

    runtime: Literal["pyxis", "apptainer", "singularity"]
    image: Line
    mounts: Lines = ()
    """``source:target``; the folder of the study has to be among them unless the site mounts it."""
    arguments: Lines = ()
    """Further arguments: of srun for pyxis, of ``exec`` for the others."""


class SlurmSettings(FrozenModel):
    """The ``[slurm]`` table."""

    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    time: SlurmTime | None = None
    """Time limit of one probe's job, as Slurm writes it; by default from the probe's own deadlines."""
    exclude: NodeLists = ()
    """Nodes that no probe may run on."""
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """The option by which GPUs are asked for; ``none`` where the site gives whole nodes and no GRES."""
    gpu_type: Line | None = None
    """As Slurm names it (``h100``), where a partition has more than one."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of the one task a node."""
    mem: Line | None = None
    """Host memory a node, as ``--mem`` takes it; ``0`` is all of it."""
    exclusive: bool = False
    extra_sbatch_lines: SbatchOptions = ()
    """Further sbatch options, with or without ``#SBATCH``."""
    setup: Lines = ()
    """Lines of bash run in the job before the launch: ``module load``, activation of an environment."""
    srun_arguments: Lines = ()
    python: Line | None = None
    """The Python to run in jobs; by default the one that runs the search, in a container ``python3``."""
    container: Container | None = None
    cache_directory: Line | None = None
    """Node-local folder for compile caches, with ``-0``, ``-1`` after it for each probe in flight. ``$NAME`` in it is
    expanded in the job. By default in /tmp."""
    pending_deadline_seconds: PositiveFloat = 86400.0
    """How long a job may wait in the queue."""

    @property
    def time_minutes(self) -> int | None:
        """The time limit in minutes, where one is set."""
        return None if self.time is None else slurm_minutes(self.time)
