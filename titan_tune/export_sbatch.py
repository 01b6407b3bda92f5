"""The result as a Slurm job: a script that runs the exported TOML on the study's cluster. Pure.

The script is the one that probes run under (``titan_tune.probe.slurm.script``), so what was measured is what runs:
the same launcher, rendezvous and allocator. Where probes differ from a training run it does not follow them: no
time limit is set, and what the job writes has the user's own file modes.
"""

from __future__ import annotations

import re
from pathlib import Path

from titan_tune.export import Export, training_arguments
from titan_tune.probe.launch import ALLOCATOR
from titan_tune.probe.slurm.script import sbatch_script
from titan_tune.probe.slurm.settings import SlurmSettings
from titan_tune.study.info import StudyInfo

NO_TIME_LIMIT = "no time limit is set here: the partition's default holds, or sbatch --time=..."


def export_sbatch(
    exported: Export, info: StudyInfo, settings: SlurmSettings, *, toml: Path, log: Path, workdir: Path
) -> str:
    """The batch script of one exported configuration.

    Args:
        exported: What ``toml`` holds.
        info: The study it is from; its cluster decides nodes and GPUs.
        settings: The site's ``[slurm]`` table.
        toml: Absolute path of the exported job file, on a file system that the nodes share.
        log: Absolute path of the file that takes both output streams.
        workdir: Absolute path of the folder that the job's relative paths start from.

    Raises:
        InputError: a path that no ``#SBATCH`` line can hold.
    """
    cluster, cuda = info.cluster, info.device == "cuda"
    script = sbatch_script(
        job_name=job_name(toml.stem),
        nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node if cuda else 0,
        nproc_per_node=cluster.gpus_per_node,
        settings=settings,
        command=training_arguments(toml),
        environment={"PYTORCH_ALLOC_CONF": ALLOCATOR} if cuda else {},
        stdout=log,
        workdir=workdir,
        time_minutes=None,
    )
    shebang, _, rest = script.partition("\n")
    comments = "".join(f"# {line}\n" for line in (*exported.comments, NO_TIME_LIMIT))
    return f"{shebang}\n{comments}{rest}"


def job_name(text: str) -> str:
    """A job name that every Slurm tool shows as it is."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("-") or "titan-tune"
