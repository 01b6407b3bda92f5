"""The batch script of a torchtitan job, as text. Pure.

Three languages meet in it, and each has quoting of its own: bash, the ``#SBATCH`` lines (sbatch splits them with
quotes and backslashes of its own), and the file names of ``--output`` (where ``%`` begins a pattern).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from titan_tune.errors import InputError
from titan_tune.probe.slurm.settings import SlurmSettings
from titan_tune.titan.plugin.environment import CACHE_DIR

EXIT_NO_FOLDER: Final = 96
"""The working folder does not exist on the node: Slurm itself would run the job in /tmp."""
EXIT_CACHE: Final = 97
"""The cache folder cannot be made on a node, or is another user's."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE: Final = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)\}|(?P<bare>[A-Za-z_]\w*))")

_CACHE_GUARD: Final = (
    f'umask 077; mkdir -p -- "${CACHE_DIR}" && [ -O "${CACHE_DIR}" ] || '
    f'{{ echo "titan-tune: $(hostname): cannot use ${CACHE_DIR} as a folder of this user" >&2; '
    f'exit {EXIT_CACHE}; }}; exec "$@"'
)
"""Compile caches hold code that ranks load: a folder that another user made first is not used."""


_STEP_END: Final = (
    "step=$!",
    "(read -r <&3; kill $step) &",
    "watcher=$!",
    "wait $step",
    "code=$?",
    "kill $watcher 2>/dev/null",
    "exit $code",
)
"""SIGTERM makes srun kill its step."""


def sbatch_script(
    *,
    job_name: str,
    nodes: int,
    gpus_per_node: int,
    settings: SlurmSettings,
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: Path,
    workdir: Path,
    time_minutes: int | None,
    nproc_per_node: int | None = None,
    exclude: Iterable[str] = (),
    cache_directory: str | None = None,
    private: bool = False,
) -> str:
    """A script for ``sbatch`` that runs one torchrun a node.

    Args:
        job_name: One line; anything but control characters.
        nodes: Number of nodes.
        gpus_per_node: GPUs asked for on each node; 0 asks for none (CPU jobs).
        settings: The site's ``[slurm]`` table. Its ``time`` is a probe's and is not used here.
        command: What torchrun is given after its rendezvous options: further options of its own, then ``-m
            torchtitan.train --job.config_file ...``. Each is one argument, whatever it contains.
        environment: Variables exported in the script, over the ones sbatch passes on.
        stdout: Absolute path of the log of both streams; its folder must exist.
        workdir: Absolute path of the folder to run in; the job ends with ``EXIT_NO_FOLDER`` where a node lacks it.
        time_minutes: Time limit; ``None`` leaves it to the partition.
        nproc_per_node: Ranks on a node, by default one a GPU.
        exclude: Nodes to keep away from, besides those of the settings.
        cache_directory: Node-local folder exported as ``TITAN_TUNE_CACHE_DIR``, made on each node; ``$NAME`` in it
            is expanded in the job.
        private: What the job writes is for this user alone.

    Raises:
        InputError: a value that no ``#SBATCH`` line can hold, or a variable name that bash does not have.
    """
    ranks = gpus_per_node if nproc_per_node is None else nproc_per_node
    options = [
        ("job-name", job_name),
        ("nodes", str(nodes)),
        ("ntasks-per-node", "1"),
        *_gpu_options(gpus_per_node, settings),
        *_site_options(settings, exclude),
        *([("time", str(time_minutes))] if time_minutes is not None else []),
        ("output", _pattern(stdout)),
        ("chdir", str(workdir)),
    ]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={_sbatch_word(value, name)}" for name, value in options]
    lines += ["#SBATCH --no-requeue"]
    lines += ["#SBATCH --exclusive"] if settings.exclusive else []
    lines += [f"#SBATCH {line}" for line in settings.extra_sbatch_lines]
    lines += ["", "# tasks get this script's environment, however the job was submitted"]
    lines += ["export SLURM_EXPORT_ENV=ALL"]
    lines += ["umask 077"] if private else []
    lines += _preparation(settings, environment, workdir, cache_directory)
    if settings.cpus_per_task is not None:
        lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
    if nodes > 1:
        lines += [
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 10000))",
        ]
    srun = srun_words(nodes, settings)
    lines += [
        "",
        _launch(srun, settings, rendezvous(nodes, ranks), command, cache=cache_directory is not None),
    ]
    return "\n".join(lines) + "\n"


def step_script(
    *,
    name: str,
    nodes: Sequence[str],
    port: int,
    nproc_per_node: int,
    step_options: Sequence[str],
    settings: SlurmSettings,
    command: Sequence[str],
    environment: Mapping[str, str],
    workdir: Path,
    cache_directory: str,
    tied: bool = True,
) -> str:
    """A bash script that runs one torchrun on each of ``nodes`` as a step of the allocation it runs in.

    Args:
        name: The step's name, by which it is found.
        nodes: Names of the nodes; the first is where ranks meet, at ``port``.
        port: Not used by any other step on that node.
        nproc_per_node: Ranks on a node.
        step_options: Further options of srun: the step's share of each node.
        settings: As for :func:`sbatch_script`; what concerns submission is not used.
        command: As for :func:`sbatch_script`.
        environment: As for :func:`sbatch_script`.
        workdir: The folder to run in.
        cache_directory: As for :func:`sbatch_script`.
        tied: The step ends when the script's standard input does: a search that is killed leaves none behind.
    """
    lines = ["#!/bin/bash", "umask 077"]
    lines += _preparation(settings, environment, workdir, cache_directory)
    lines += [f"head={shlex.quote(nodes[0])}", f"port={port}"]
    srun = [
        *srun_words(len(nodes), settings),
        f"--job-name={name}", f"--nodelist={','.join(nodes)}", "--export=ALL", *step_options,
    ]  # fmt: skip
    launch = _launch(srun, settings, rendezvous(len(nodes), nproc_per_node), command, cache=True)
    lines += ["", "exec 3<&0 </dev/null", f"{launch} &", *_STEP_END] if tied else ["", f"exec {launch}"]
    return "\n".join(lines) + "\n"


def _preparation(
    settings: SlurmSettings, environment: Mapping[str, str], workdir: Path, cache_directory: str | None
) -> list[str]:
    """The folder, the site's set-up, the variables: what comes before the launch."""
    folder = shlex.quote(str(workdir))
    lines = [
        f"cd -- {folder} || {{ printf 'titan-tune: %s has no folder %s\\n' \"$(hostname)\" {folder} >&2; "
        f"exit {EXIT_NO_FOLDER}; }}"
    ]
    lines += settings.setup
    lines += [f"export {_variable_name(name)}={shlex.quote(value)}" for name, value in environment.items()]
    if cache_directory is not None:
        lines.append(f"export {CACHE_DIR}={expanding(cache_directory)}")
    return lines


def _launch(
    srun: Sequence[str],
    settings: SlurmSettings,
    meeting: Sequence[str],
    command: Sequence[str],
    *,
    cache: bool,
) -> str:
    """The command line; ``meeting`` is bash already."""
    parts = [
        _quoted(srun),
        _quoted(["bash", "-c", _CACHE_GUARD, "titan-tune"]) if cache else "",
        _quoted(torchrun_words(settings)),
        " ".join(meeting),
        _quoted(command),
    ]
    return " \\\n  ".join(filter(None, parts))


def srun_words(nodes: int, settings: SlurmSettings) -> list[str]:
    """``srun`` for one task on each of ``nodes`` nodes, in the container where it is srun's to enter."""
    words = [
        "srun", "--kill-on-bad-exit=1", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1",
        *settings.srun_arguments,
    ]  # fmt: skip
    container = settings.container
    if container is not None and container.runtime == "pyxis":
        words += [f"--container-image={container.image}"]
        words += [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
        words += container.arguments
    return words


def torchrun_words(settings: SlurmSettings) -> list[str]:
    """``python -m torch.distributed.run``, in the container where a command enters it."""
    words: list[str] = []
    container = settings.container
    if container is not None and container.runtime != "pyxis":
        words = [container.runtime, "exec", "--nv"]
        words += [f"--bind={mount}" for mount in container.mounts]
        words += [*container.arguments, container.image]
    own = sys.executable if container is None else "python3"  # this one's path means nothing in an image
    return [*words, settings.python or own, "-m", "torch.distributed.run"]


def rendezvous(nodes: int, ranks: int) -> list[str]:
    """torchrun's options for the job's nodes, as bash words that use ``$head`` and ``$port``.

    One node needs no agreement: ``--standalone`` takes a free port, whatever else runs there.
    """
    if nodes == 1:
        return ["--standalone", f"--nproc-per-node={ranks}"]
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        '--rdzv-id="$SLURM_JOB_ID"',
        "--rdzv-backend=c10d",
        '--rdzv-endpoint="$head:$port"',
    ]


def expanding(text: str) -> str:
    """``text`` as one bash word in which only ``$NAME`` and ``${NAME}`` are expanded; unset ones end the script."""
    parts, at = [], 0
    for match in _VARIABLE.finditer(text):
        parts.append(shlex.quote(text[at : match.start()]) if match.start() > at else "")
        parts.append(f'"${{{match["braced"] or match["bare"]}:?}}"')
        at = match.end()
    rest = text[at:]
    return "".join(parts) + (shlex.quote(rest) if rest or not parts else "")


def _gpu_options(gpus: int, settings: SlurmSettings) -> list[tuple[str, str]]:
    if gpus == 0 or settings.gpus == "none":
        return []
    count = f"{settings.gpu_type}:{gpus}" if settings.gpu_type else str(gpus)
    return [("gres", f"gpu:{count}")] if settings.gpus == "gres" else [("gpus-per-node", count)]


def _site_options(settings: SlurmSettings, exclude: Iterable[str]) -> list[tuple[str, str]]:
    named: list[tuple[str, str | int | None]] = [
        ("partition", settings.partition),
        ("account", settings.account),
        ("qos", settings.qos),
        ("constraint", settings.constraint),
        ("reservation", settings.reservation),
        ("cpus-per-task", settings.cpus_per_task),
        ("mem", settings.mem),
        ("exclude", ",".join(dict.fromkeys([*settings.exclude, *exclude])) or None),
    ]
    return [(name, str(value)) for name, value in named if value is not None]


def _pattern(path: Path) -> str:
    """A path as a file name pattern that stands for itself."""
    text = str(path)
    if "\\" in text:
        raise InputError(f"{text!r}: Slurm cannot write to a path with a backslash")
    return text.replace("%", "%%")


def _sbatch_word(text: str, option: str) -> str:
    """One word of an ``#SBATCH`` line. sbatch knows double quotes, and backslashes before any character."""
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise InputError(f"--{option}={text!r}: an #SBATCH line cannot hold control characters")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _variable_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name of an environment variable")
    return name


def _quoted(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
