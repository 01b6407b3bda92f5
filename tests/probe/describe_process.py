"""Custom import of a test: each rank writes what its process is like when torchtitan begins."""

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

main = sys.modules["__main__"]
facts = {
    "environment": dict(os.environ),
    "argv": sys.argv,
    "path": sys.path,
    "flags": repr(sys.flags),
    "cwd": str(Path.cwd()),
    "main": [main.__name__, main.__spec__.name, main.__file__, "torchtitan.train" in sys.modules],
    "leads_session": os.getsid(0) == os.getpid(),
    "stdin": str(Path("/proc/self/fd/0").readlink()),
    "line_buffering": [sys.stdout.write_through, sys.stderr.write_through],
    "signals": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "torch_seed": torch.initial_seed(),
    "cuda": torch.cuda.is_initialized(),
    "affinity": sorted(os.sched_getaffinity(0)),
    "random": random.random(),
}
path = Path(os.environ["TITAN_TUNE_METRICS_DIR"]) / f"process.rank{os.environ['RANK']}.json"
path.write_text(json.dumps(facts))
