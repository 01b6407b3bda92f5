from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from titan_tune.trace import TraceError, TraceResult, trace_memory
from titan_tune.trace import run as run_module
from titan_tune.trace.events import Point

RESULT = TraceResult(
    active_bytes=3,
    phase="forward",
    components={"parameters": 1, "activations": 2},
    phases={"forward": 3},
    reserved_bytes=None,
    allocator="expandable",
    timeline=(Point(0, "forward", 3),),
    rank=0,
    stages=(0,),
    traced_layers=(4, 5),
    num_events=1,
    seconds=0.5,
    torch_version="2.11.0",
    assumptions=("one sentence",),
)


def test_result_survives_json() -> None:
    assert TraceResult.from_dict(json.loads(json.dumps(RESULT.as_dict()))) == RESULT


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the interpreter: a script that ignores ``-m titan_tune.trace.child``."""
    script = tmp_path / "child"
    monkeypatch.setattr(run_module.sys, "executable", str(script))
    return script


def write(script: Path, body: str) -> None:
    script.write_text(f"#!{os.path.realpath('/proc/self/exe')}\n{body}")
    script.chmod(0o755)


def ask(timeout_seconds: float = 30.0) -> TraceResult:
    return trace_memory({"training.seq_len": 8}, model_args={}, world_size=2, timeout_seconds=timeout_seconds)


def test_answer_of_the_child(child: Path) -> None:
    write(
        child,
        "import json, sys\n"
        "request = json.load(sys.stdin)\n"
        "assert request['values'] == {'training.seq_len': 8} and request['world_size'] == 2\n"
        f"print({json.dumps(RESULT.as_dict())!r})\n",
    )
    assert ask() == RESULT


def test_error_of_the_child(child: Path) -> None:
    write(child, 'print(\'{"error": "ValueError: no"}\')\n')
    with pytest.raises(TraceError, match="ValueError: no"):
        ask()


def test_child_that_dies(child: Path) -> None:
    write(child, "import sys\nprint('out of luck', file=sys.stderr)\nsys.exit(7)\n")
    with pytest.raises(TraceError, match="exit code 7: out of luck"):
        ask()


def test_child_that_hangs_is_gone(child: Path, tmp_path: Path) -> None:
    write(
        child,
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n",
    )
    with pytest.raises(TraceError, match="did not end within 1 s"):
        ask(timeout_seconds=1.0)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_package_does_not_import_torch() -> None:
    import subprocess

    code = "import sys, titan_tune.trace; sys.exit('torch' in sys.modules or 'torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
