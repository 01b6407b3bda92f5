"""Real Slurm clusters, one a session and kind; on a machine without Slurm their tests are skipped."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, memory_is_constrained, missing
from slurm_helpers import Cluster


def running_cluster(nodes: int, *, accounting: bool = False, constrain_memory: bool = False):
    why = missing(accounting=accounting)
    if why is not None:
        required = os.environ.get("CI") or os.environ.get("TITAN_TUNE_REQUIRE_SLURM")
        (pytest.fail if required else pytest.skip)(f"no Slurm cluster on this machine: {why}")
    # short, because the paths of Unix sockets end at 107 characters
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    cluster = SlurmCluster(root, nodes=nodes, accounting=accounting, constrain_memory=constrain_memory)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def plain_slurm() -> Iterator[SlurmCluster]:
    """Four nodes, no accounting."""
    yield from running_cluster(4)


@pytest.fixture(scope="session")
def accounting_slurm() -> Iterator[SlurmCluster]:
    """Three nodes, slurmdbd and MariaDB."""
    yield from running_cluster(3, accounting=True)


@pytest.fixture(scope="session")
def memory_slurm() -> Iterator[SlurmCluster]:
    """One node that holds jobs to their memory."""
    if not memory_is_constrained():
        pytest.skip("no cgroup v1 memory controller on this machine")
    yield from running_cluster(1, constrain_memory=True)


@pytest.fixture
def slurm(plain_slurm, tmp_path):
    """The cluster without accounting; whatever a test did to it is undone."""
    yield from usable(plain_slurm, tmp_path)


@pytest.fixture(params=["plain", "accounting"])
def either_slurm(request, tmp_path):
    """Both kinds of site."""
    yield from usable(request.getfixturevalue(f"{request.param}_slurm"), tmp_path)


@pytest.fixture
def limited_slurm(memory_slurm, tmp_path):
    """The cluster that ends jobs for their memory."""
    yield from usable(memory_slurm, tmp_path)


def usable(cluster, tmp_path):
    used = Cluster(cluster, tmp_path)
    try:
        yield used
        used.close_runners()
        assert cluster.live_jobs() == []
    finally:
        used.close_runners()
        cluster.repair()
