"""A real PostgreSQL for tests: a private cluster on a Unix socket, ended with the test process however that ends."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

START_SECONDS = 60.0
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def binaries() -> Path | None:
    """Where initdb and postgres are, or ``None``: Debian keeps them off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


class PostgresServer:
    """Starts, stops and starts again on the same data."""

    def __init__(self, folder: Path, programs: Path):
        self.folder, self.programs = folder, programs
        self.process: subprocess.Popen[bytes] | None = None
        self.identity: dict[str, object] = {}
        if os.geteuid() == 0:  # postgres refuses to run as root
            user = pwd.getpwnam("postgres")
            self.identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(folder, user.pw_uid, user.pw_gid)
        folder.chmod(0o755)
        self._run("initdb", "-D", folder / "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")

    @classmethod
    def create(cls, programs: Path) -> PostgresServer:
        """In a new folder with a short name: socket paths end at 107 characters."""
        return cls(Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp")), programs)

    def start(self) -> None:
        options = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=200")
        settings = [part for option in ("listen_addresses=", *options) for part in ("-c", option)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.programs / "postgres", "-D", self.folder / "data", "-k", self.folder, *settings],
                env=self._environment(), cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=lambda: _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGQUIT),
                **self.identity,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        ready = [self.programs / "pg_isready", "-q", "-h", self.folder]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline, "postgres did not become ready"
            time.sleep(0.02)

    def stop(self) -> None:
        """Drop every connection and shut down."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGQUIT)
                self.process.wait()
        self.process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_database(self, name: str) -> str:
        """The URL of a new, empty database."""
        self._run("createdb", "-h", self.folder, "-U", "postgres", name)
        return f"postgresql+psycopg://postgres@/{name}?host={self.folder}"

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self.programs / program), *map(str, arguments)]
        done = subprocess.run(
            command, env=self._environment(), cwd="/", capture_output=True, text=True, check=False,
            **self.identity,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def _environment(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": str(self.folder)}
