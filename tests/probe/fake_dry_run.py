"""One simulated rank for tests: writes what the plug-in writes in a dry run, as the scenario says.

``python fake_dry_run.py SCENARIO``: a JSON object of what a rank does by its number ("0", "1", ... or "*"):
``seconds`` (a step), ``active`` and ``reserved`` (GiB), ``chunks``, ``collectives``, ``error`` (type and message;
nothing else is written then) and ``sleep`` (never ends).
"""

import json
import os
import sys
import time
from pathlib import Path

rank = int(os.environ["TITAN_TUNE_DRY_RUN_RANK"])
scenario = json.loads(sys.argv[1])
mine = {"seconds": 1.0, "active": 10, "reserved": 12, **scenario.get("*", {}), **scenario.get(str(rank), {})}
directory = Path(os.environ["TITAN_TUNE_METRICS_DIR"])
(directory / "seen.json").write_text(
    json.dumps({key: os.environ.get(key) for key in ("NGPU", "CUDA_VISIBLE_DEVICES")})
)

if error := mine.get("error"):
    kind, message = error
    record = {
        "rank": rank, "time": time.time(), "type": kind, "message": message, "phase": "forward", "step": 1,
        "bytes_asked": 2**30, "allocated_bytes": 70 * 2**30,
    }  # fmt: skip
    (directory / f"error.rank{rank}.json").write_text(json.dumps(record))
    sys.exit(1)

lines = [{"kind": "header", "has_loss": True, "float8_linear_modules": 0, "num_parameters": 10}]
for step in range(1, 9):
    lines.append(
        {
            "kind": "step", "step": step, "loss": 8.0, "grad_norm": 1.0, "step_seconds": mine["seconds"],
            "tokens_per_second": 1.0, "active_bytes": int(mine["active"] * 2**30),
            "reserved_bytes": int(mine["reserved"] * 2**30), "device_bytes": 0, "alloc_retries": 0, "ooms": 0,
            "time": time.time(),
        }
    )  # fmt: skip
lines.append({"kind": "end", "captured_graphs": 0})
text = "".join(json.dumps({**line, "rank": rank}) + "\n" for line in lines)
counted = {
    "rank": rank, "world_size": int(os.environ["NGPU"]), "step": 2, "answer_seconds": 0.0,
    "collectives": mine.get("collectives", []), "chunks": mine.get("chunks", []),
}  # fmt: skip
(directory / f"collectives.rank{rank}.json").write_text(json.dumps(counted))
if mine.get("sleep"):
    (directory / f"metrics.rank{rank}.jsonl").write_text("")
    time.sleep(10_000)
(directory / f"metrics.rank{rank}.jsonl").write_text(text)
