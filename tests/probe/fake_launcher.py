"""A launcher for tests: writes the metrics that torchtitan's ranks would, as the scenario says.

``python fake_launcher.py SCENARIO``: a JSON object with ``ranks``, ``steps``, ``seconds`` (what a step is
said to take), ``end`` (whether the ranks say that they are done) and ``then``: exit, sleep, stubborn (ignores
SIGTERM, with a child in a session of its own), nan, or busy-port (fails once, then exits well).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

scenario = json.loads(sys.argv[1])
directory = Path(os.environ["TITAN_TUNE_METRICS_DIR"])
then = scenario["then"]

if then == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "10000"], start_new_session=True)
if then == "busy-port" and not (directory / "attempt1").exists():
    print("RuntimeError: EADDRINUSE: address already in use", flush=True)
    sys.exit(1)

header = {"kind": "header", "has_loss": True, "float8_linear_modules": 0, "num_parameters": 10}
lines = [header]
for step in range(1, scenario["steps"] + 1):
    lines.append(
        {
            "kind": "step", "step": step, "loss": 8.0 - 0.01 * step, "grad_norm": 1.0,
            "step_seconds": scenario["seconds"], "tokens_per_second": 1.0, "active_bytes": 100 + step,
            "reserved_bytes": 200, "device_bytes": 300, "alloc_retries": 0, "ooms": 0, "time": time.time(),
        }
    )  # fmt: skip
    if step == 1:
        lines.append({"kind": "compile", "captured_graphs": 0})
if scenario.get("end"):
    lines.append({"kind": "end", "captured_graphs": 0})
if then == "nan":
    lines[-1] |= {"loss": "nan"}
for rank in range(scenario["ranks"]):
    text = "".join(json.dumps({**line, "rank": rank}) + "\n" for line in lines)
    (directory / f"metrics.rank{rank}.jsonl").write_text(text)
if then in ("sleep", "stubborn", "nan"):
    time.sleep(10_000)
