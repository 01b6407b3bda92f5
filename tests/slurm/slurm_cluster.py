"""A real Slurm cluster of several nodes on this one machine (root, Slurm of Debian 12 or newer).

Each node is a slurmd in PID, UTS and mount namespaces of its own, with the address 127.0.1.<i> on the shared
loopback and a hosts file in which all names resolve; killing the namespace's init is a power loss. All daemons
are children in the foreground that die with this process, also when it is killed.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
DBD_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb", "mariadb-install-db")
CPUS, GPUS = 8, 8
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)

SLURM_CONF = """\
ClusterName=vt
SlurmctldHost=ctl(127.0.0.1)
SlurmctldPort={ctld_port}
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
SelectType=select/cons_tres
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
MpiDefault=none
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=3
KillWait=2
UnkillableStepTimeout=20
MinJobAge=600
FirstJobId={first_job}
{tasks}
{accounting}
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""
PLAIN_TASKS = "TaskPlugin=task/none\nSelectTypeParameters=CR_Core"
MEMORY_TASKS = "TaskPlugin=task/cgroup\nSelectTypeParameters=CR_Core_Memory"
"""Memory is a resource that jobs are held to."""
CGROUP_V1 = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"
NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none"
# without AccountingStoragePass sacct would ask the machine's munged instead of this cluster's
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStorageTRES=gres/gpu
AccountingStoragePass={root}/munge.sock"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
DbdHost=ctl
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser=root
LogFile={root}/log/slurmdbd.log
PidFile={root}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
"""
CREATE_DATABASE = (
    "CREATE DATABASE IF NOT EXISTS slurm_acct; "
    "CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY 'slurm'; "
    "GRANT ALL ON slurm_acct.* TO slurm@'127.0.0.1'"
)


def missing(*, accounting: bool) -> str | None:
    """Why no cluster can run here, or ``None``."""
    if os.geteuid() != 0:
        return "needs root"
    path = os.environ["PATH"] + ":/usr/sbin"
    for program in PROGRAMS + (DBD_PROGRAMS if accounting else ()):
        if not shutil.which(program, path=path):
            return f"{program} is not installed"
    namespaces = ["unshare", "--pid", "--fork", "--uts", "--mount", "true"]
    if subprocess.run(namespaces, capture_output=True).returncode:
        return "no namespaces here"
    return None


def memory_is_constrained() -> bool:
    """Whether this machine has the cgroup v1 controllers by which Slurm holds a job to its memory."""
    return Path("/sys/fs/cgroup/memory").is_dir() and Path("/sys/fs/cgroup/freezer").is_dir()


def _die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class SlurmCluster:
    """``root`` is a short private folder: the paths of Unix sockets end at 107 characters."""

    def __init__(
        self, root: Path, *, nodes: int, accounting: bool = False, constrain_memory: bool = False
    ) -> None:
        self.root, self.accounting, self.constrain_memory = root.resolve(), accounting, constrain_memory
        self.names = [f"node{i}" for i in range(1, nodes + 1)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """An environment in which Slurm's commands reach this cluster, and no other."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return {**inherited, "SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self) -> None:
        """All daemons; returns when every node is idle."""
        self._write_configuration()
        root = self.root
        self._spawn(
            "munged", "munged", "-F", "--force", f"--key-file={root}/munge.key", f"--socket={root}/munge.sock",
            f"--pid-file={root}/munged.pid", f"--log-file={root}/log/munged.log",
            f"--seed-file={root}/munged.seed",
        )  # fmt: skip
        self._until((root / "munge.sock").exists, 10, "munged")
        if self.accounting:
            self._start_accounting()
        self.start_controller("-i")  # -i: there is no state to restore yet
        for name in self.names:
            self.start_node(name)
        self.wait_for_nodes("idle")

    def stop(self) -> None:
        """Every process; nodes by SIGKILL, because ``unshare --fork`` ignores SIGTERM."""
        for name in self.names:
            self.kill_node(name)
        for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
            process = self._processes.pop(name, None)
            if process is None:
                continue
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.constrain_memory:
            self._remove_cgroups()

    # ---- what tests do to it

    def start_node(self, name: str) -> None:
        """Boot one node."""
        (self.root / "spool" / name).mkdir(exist_ok=True)
        namespaces = ("--pid", "--fork", "--kill-child", "--mount-proc")
        self._spawn(name, *self._as_host(name, f"slurmd -D -N {name} -f {self.root}/slurm.conf", *namespaces))

    def kill_node(self, name: str) -> None:
        """Power loss: every process of that node is gone."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def start_controller(self, *flags: str) -> None:
        """Start slurmctld and wait until it answers."""
        command = " ".join(("slurmctld", "-D", *flags, "-f", f"{self.root}/slurm.conf"))
        self._spawn("slurmctld", *self._as_host("ctl", command))
        self._until(lambda: "is UP" in self.run("scontrol", "ping", check=False).stdout, 15, "slurmctld")

    def forget_everything(self) -> None:
        """Restart slurmctld without its state: no job is known any more.

        It goes on with other ids: while nodes still end what they ran, a new job of an old id would be ended too.
        """
        self.stop_controller(graceful=False)
        conf = self.root / "slurm.conf"
        first = int(re.search(r"FirstJobId=(\d+)", conf.read_text())[1])
        conf.write_text(conf.read_text().replace(f"FirstJobId={first}", f"FirstJobId={first + 500}"))
        (self.root / "state" / "job_state").unlink(missing_ok=True)
        self.start_controller("-c", "-i")

    def stop_controller(self, *, graceful: bool = True) -> None:
        """Stop slurmctld; a killed one loses what it has not saved, up to the last seconds' jobs."""
        process = self._processes.pop("slurmctld")
        process.terminate() if graceful else process.kill()
        process.wait()

    def repair(self) -> None:
        """No job, every daemon up and every node idle, whatever a test did."""
        if "slurmctld" not in self._processes:
            self.start_controller()
        self.run("scancel", "-u", "root", check=False)
        for name in self.names:
            if name not in self._processes:
                self.start_node(name)
            elif self.node_states()[name].rstrip("*") in ("down", "drained"):
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        self.wait_for_nodes("idle")

    def node_states(self) -> dict[str, str]:
        """State by node, as sinfo says it."""
        out = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False).stdout
        return {**dict.fromkeys(self.names, ""), **dict(line.split() for line in out.splitlines())}

    def wait_for_nodes(self, state: str, names: Iterable[str] = ()) -> None:
        """Until these (by default all) nodes have the state."""
        wanted = list(names) or self.names
        self._until(lambda: all(self.node_states()[name] == state for name in wanted), 40, f"nodes {state}")

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, in the folder for jobs."""
        return subprocess.run(
            command, env=self.env, cwd=self.root / "jobs", text=True, capture_output=True, timeout=60,
            check=check,
        )  # fmt: skip

    def live_jobs(self) -> list[str]:
        """Ids of the jobs that have not ended."""
        return self.run("squeue", "-h", "-o", "%i").stdout.split()

    # ---- set-up

    def _write_configuration(self) -> None:
        root = self.root
        for folder in ("spool", "log", "state", "dev", "jobs"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        named = {
            "root": root,
            "ctld_port": _free_port(),
            "dbd_port": _free_port(),
            "sql_port": _free_port(),
            # ports of jobs come from their ids: two clusters on one loopback must not share them
            "first_job": random.randrange(1, 400) * 1000,
        }
        self._sql_port = named["sql_port"]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.1.{i} Port={_free_port()} CPUs={CPUS} Boards=1"
            f" Sockets=1 CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory=4000 Gres=gpu:h100:{GPUS}"
            for i, name in enumerate(self.names, 1)
        )
        accounting = ACCOUNTING.format(**named) if self.accounting else NO_ACCOUNTING
        tasks = MEMORY_TASKS if self.constrain_memory else PLAIN_TASKS
        conf = SLURM_CONF.format(**named, accounting=accounting, nodes=nodes, tasks=tasks)
        (root / "slurm.conf").write_text(conf)
        for gpu in range(GPUS):  # gres.conf wants device files: these are copies of /dev/null
            os.mknod(root / "dev" / f"nvidia{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        gres = (
            f"NodeName={name} Name=gpu Type=h100 File={root}/dev/nvidia[0-{GPUS - 1}]" for name in self.names
        )
        (root / "gres.conf").write_text("\n".join(["AutoDetect=off", *gres, ""]))
        (root / "cgroup.conf").write_text(CGROUP_V1 if self.constrain_memory else "CgroupAutomount=no\n")
        hosts = [f"127.0.1.{i} {name}" for i, name in enumerate(self.names, 1)]
        (root / "hosts").write_text("\n".join(["127.0.0.1 localhost", "127.0.0.1 ctl", *hosts, ""]))
        (root / "munge.key").write_bytes(secrets.token_bytes(128))
        (root / "munge.key").chmod(0o400)
        if self.accounting:
            (root / "slurmdbd.conf").write_text(SLURMDBD_CONF.format(**named))
            (root / "slurmdbd.conf").chmod(0o600)

    def _start_accounting(self) -> None:
        root, data = self.root, self.root / "sql"
        with (root / "log" / "sql-install.out").open("wb") as log:
            subprocess.run(
                ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}",
                 "--auth-root-authentication-method=normal", "--skip-test-db"],
                check=True, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._spawn(
            "mariadbd", "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={root}/sql.sock",
            "--bind-address=127.0.0.1", f"--port={self._sql_port}", f"--pid-file={root}/mariadbd.pid",
            "--innodb-buffer-pool-size=128M", "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0",
            "--innodb-lock-wait-timeout=900",
        )  # fmt: skip
        sql = ("mariadb", "--no-defaults", f"--socket={root}/sql.sock", "-uroot", "-e", CREATE_DATABASE)
        self._until(lambda: self.run(*sql, check=False).returncode == 0, 30, "mariadbd")
        self._spawn("slurmdbd", *self._as_host("ctl", "slurmdbd -D"))
        listed = ("sacctmgr", "-n", "-P", "list", "cluster")
        self._until(lambda: self.run(*listed, check=False).returncode == 0, 30, "slurmdbd")
        self.run("sacctmgr", "-i", "add", "cluster", "vt", check=False)

    def _remove_cgroups(self) -> None:
        """Slurm leaves its empty cgroups behind."""
        for name in self.names:
            for controller in Path("/sys/fs/cgroup").iterdir():
                for folder in sorted((controller / f"slurm_{name}").rglob("*/"), reverse=True):
                    folder.rmdir()
                if (controller / f"slurm_{name}").is_dir():
                    (controller / f"slurm_{name}").rmdir()

    def _as_host(self, hostname: str, command: str, *namespaces: str) -> tuple[str, ...]:
        """``command`` where the cluster's hosts file is /etc/hosts and the host has this name."""
        shell = f"mount --bind {self.root}/hosts /etc/hosts && hostname {hostname} && exec {command}"
        return ("unshare", *namespaces, "--uts", "--mount", "sh", "-c", shell)

    def _spawn(self, name: str, *command: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, cwd=self.root,
                preexec_fn=_die_with_parent, start_new_session=True,
            )  # fmt: skip

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(
                        f"{name} ended with {process.returncode}; see {self.root}/log/{name}.out"
                    )
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:g} s; see {self.root}/log")
            time.sleep(0.02)
