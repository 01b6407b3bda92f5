"""torch and torchtitan in miniature: what a zygote imports and what its ranks run, without the weight.

``write(directory)`` makes the packages; put the folder first on PYTHONPATH. ``torchtitan.train`` does what the
JSON object in FAKE_RANKS says: ``steps`` to record, then, by rank (``"0"``, ``"1"``): exit, fail, kill, sleep or
stubborn (ignores SIGTERM, with a child in a session of its own).
"""

import json

ERRORS = """
class ProcessFailure:
    def __init__(self, local_rank, pid, exitcode, error_file):
        self.text = f"  rank      : {local_rank} (local_rank: {local_rank})\\n  exitcode  : {exitcode} (pid: {pid})"

class ChildFailedError(Exception):
    def __init__(self, name, failures):
        first = next(iter(failures.values()))
        super().__init__(f"{name} FAILED\\nRoot Cause (first observed failure):\\n{first.text}")
"""

TRAIN = """
import json, os, signal, subprocess, sys, time

class Trainer:
    pass

if __name__ == "__main__":
    directory, rank = os.environ["TITAN_TUNE_METRICS_DIR"], os.environ["RANK"]
    scenario = json.loads(os.environ["FAKE_RANKS"])
    then = scenario.get(rank, "exit")
    print(f"arguments {sys.argv[1:]}")
    if then == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "10000"], start_new_session=True)
    lines = [{"kind": "header", "has_loss": True, "float8_linear_modules": 0, "process_start": time.time(),
              "plugin_import": time.time(), "training_start": time.time(), "pid": os.getpid()}]
    for step in range(1, scenario["steps"] + 1):
        lines.append({"kind": "step", "step": step, "loss": 8.0, "grad_norm": 1.0, "step_seconds": 0.5,
            "tokens_per_second": 1.0, "active_bytes": 1, "reserved_bytes": 2, "device_bytes": 3,
            "alloc_retries": 0, "ooms": 0, "time": time.time()})
    with open(f"{directory}/metrics.rank{rank}.jsonl", "w") as file:
        file.write("".join(json.dumps(line) + "\\n" for line in lines))
    if then == "fail":
        raise ValueError("boom")
    if then == "kill":
        sys.stdout.write("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    if then in ("sleep", "stubborn"):
        time.sleep(10_000)
"""

CONFIG = """
import sys

class ConfigManager:
    def parse_args(self, args=sys.argv[1:]):
        return args
"""

TORCH = """
class cuda:
    is_initialized = staticmethod(lambda: False)

class default_generator:
    seed = staticmethod(lambda: None)
"""

STORE = """
class TCPStore:
    def __init__(self, host, port, **options):
        pass
"""

FILES = {
    "psutil.py": "",
    "triton.py": "",
    "numpy.py": "class random:\n    seed = staticmethod(lambda: None)\n",
    "torch/__init__.py": TORCH,
    "torch/_dynamo.py": "",
    "torch/_inductor/__init__.py": "",
    "torch/_inductor/compile_fx.py": "",
    "torch/_inductor/codegen/__init__.py": "",
    "torch/_inductor/codegen/triton.py": "",
    "torch/_inductor/codecache.py": "torch_key = bytes\n",
    "torch/_inductor/runtime/__init__.py": "",
    "torch/_inductor/runtime/triton_compat.py": "HAS_TRITON = True\ntriton_key = str\n",
    "torch/distributed/__init__.py": STORE,
    "torch/distributed/elastic/__init__.py": "",
    "torch/distributed/elastic/multiprocessing/__init__.py": "",
    "torch/distributed/elastic/multiprocessing/errors.py": ERRORS,
    "torchao/__init__.py": "",
    "torchao/float8.py": "",
    "torchtitan/__init__.py": "",
    "torchtitan/config.py": CONFIG,
    "torchtitan/components/__init__.py": "",
    "torchtitan/components/quantization/__init__.py": "",
    "torchtitan/components/quantization/float8.py": "",
    "torchtitan/train.py": TRAIN,
}


def write(directory, **changes):
    """Make the packages in ``directory``; ``changes`` replaces files by name."""
    for name, text in {**FILES, **changes}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def ranks(*, steps, **then):
    """The environment variable that tells the ranks what to do: ``r0="exit"``, ``r1="fail"``."""
    scenario = {"steps": steps, **{name.removeprefix("r"): what for name, what in then.items()}}
    return ("FAKE_RANKS", json.dumps(scenario))
