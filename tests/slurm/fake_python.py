#!/usr/bin/env python3
"""Stands for ``python -m torch.distributed.run``: writes the metrics that torchtitan's ranks would.

The scenario is JSON in FAKE_SCENARIO: ``steps``, ``seconds`` (what a step is said to take), ``then`` (exit, sleep,
pause, wait, meet, oom, host-oom or fail) and ``code``. ``first`` holds changes for the first attempt alone.
"""

import json
import os
import re
import socket
import sys
import time
from pathlib import Path

directory = Path(os.environ.get("TITAN_TUNE_METRICS_DIR", "."))  # an exported job has none
scenario = {
    "steps": 10,
    "seconds": 0.5,
    "then": "exit",
    "code": 1,
    **json.loads(os.environ.get("FAKE_SCENARIO", "{}")),
}
if not (directory / "attempt1").exists():
    scenario |= scenario.get("first", {})
ranks = int(re.search(r"--nproc-per-node=(\d+)", " ".join(sys.argv))[1])
node = int(os.environ["SLURM_NODEID"])
host = socket.gethostname()
print(f"on {host}", flush=True)
if node == 0:
    seen = {"arguments": sys.argv[1:], "environment": dict(os.environ)}
    (directory / "seen.json").write_text(json.dumps(seen))

header = {
    "kind": "header", "has_loss": True, "float8_linear_modules": 0, "num_parameters": 10, "hostname": host,
}  # fmt: skip
lines = [header]
for step in range(1, scenario["steps"] + 1):
    lines.append(
        {
            "kind": "step", "step": step, "loss": 8.0 - 0.01 * step, "grad_norm": 1.0,
            "step_seconds": scenario["seconds"] * (1 + 0.2 * (step % 2)), "tokens_per_second": 1.0,
            "active_bytes": 100 + step, "reserved_bytes": 200, "device_bytes": 300, "alloc_retries": 0, "ooms": 0,
            "time": time.time(),
        }
    )  # fmt: skip
    if step == 1:
        lines.append({"kind": "compile", "captured_graphs": 0})
for rank in range(node * ranks, (node + 1) * ranks):
    text = "".join(json.dumps({**line, "rank": rank}) + "\n" for line in lines)
    (directory / f"metrics.rank{rank}.jsonl").write_text(text)

match scenario["then"]:
    case "meet":  # a barrier of two jobs: each waits for the other to be running
        folder = Path(scenario["folder"])
        (folder / directory.name).touch()
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.05)
    case "pause":
        time.sleep(2)
    case "wait":
        while not Path(scenario["file"]).exists():
            time.sleep(0.05)
    case "sleep":
        time.sleep(10_000)
    case "oom":
        rank = node * ranks
        error = {
            "rank": rank, "pid": os.getpid(), "time": time.time(), "type": "torch.OutOfMemoryError", "step": 2,
            "message": "CUDA out of memory. Tried to allocate 2.00 GiB", "phase": "forward",
            "bytes_asked": 2 << 30, "frames": [],
        }  # fmt: skip
        (directory / f"error.rank{rank}.json").write_text(json.dumps(error))
        sys.exit(1)
    case "host-oom":
        held = []
        while True:
            held.append(bytearray(os.urandom(1 << 20)) * 32)
    case "fail":
        sys.exit(scenario["code"])
