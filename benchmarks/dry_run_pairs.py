"""Real and dry runs of the same two-GPU jobs, one after the other on one machine.

    python benchmarks/dry_run_pairs.py -o tests/data/h200_pairs.jsonl --seconds 560 [--only NAME,NAME] [--profile NAME]

For each layout: the real job on GPUs 0 and 1, then every simulated rank alone on its GPU. Layouts come in twos, so that
the dry runs of both share the two GPUs, one rank on each at a time (``--devices 0``: one by one). A row a layout,
appended as it comes; a second run goes on where the first stopped. ``benchmarks/dry_run_accuracy.py`` reads the rows.
``--profile`` adds one profiled step of both runs: milliseconds a kernel, to see what makes them differ;
``--profile-slow N`` does so for the first N layouts whose rank alone is slower than the real job. Without GPUs the jobs
are shrunk to a few layers: that shows that the script runs, and nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from measure_table import Table

from titan_tune.domain.candidate import Value
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import ProbeOutcome, ProbeSettings, ProbeSpec, StepRecord
from titan_tune.machine import local_cluster
from titan_tune.probe import files
from titan_tune.probe.dry_run import RANK_DIRECTORY, DryRunner
from titan_tune.probe.dry_run_model import ALL
from titan_tune.probe.local import LocalRunner
from titan_tune.probe.toml import probe_values
from titan_tune.titan.job import job_from_text, render
from titan_tune.titan.settings import resolve

POLL_SECONDS = 0.1
GPUS: Final = 2
STEPS: Final = 12
WARMUP_STEPS: Final = 3
PROFILED_STEPS: Final = 8
KERNELS: Final = 40
"""How many of a profiled step are kept, the longest first."""

ARGS = "titan_tune.model_args."
LLAMA: Final = {"model.name": "llama3", "training.seq_len": 4096, "titan_tune.data": "synthetic"}
SHAPE: Final = {
    f"{ARGS}n_kv_heads": 8,
    f"{ARGS}vocab_size": 128256,
    f"{ARGS}rope_theta": 500000,
    f"{ARGS}multiple_of": 256,
}
MODELS: Final[Mapping[str, Mapping[str, Value]]] = {
    "1B": LLAMA | SHAPE | {"model.flavor": "1B", f"{ARGS}dim": 2048, f"{ARGS}n_layers": 16, f"{ARGS}n_heads": 32}
    | {f"{ARGS}ffn_dim_multiplier": 1.5},
    "3B": LLAMA | SHAPE | {"model.flavor": "3B", f"{ARGS}dim": 3072, f"{ARGS}n_layers": 28, f"{ARGS}n_heads": 24}
    | {f"{ARGS}ffn_dim_multiplier": 1.0},
    "8B": LLAMA | {"model.flavor": "8B", "training.seq_len": 8192},
    "moe": {"model.name": "deepseek_v3", "model.flavor": "16B", f"{ARGS}n_layers": 6, "training.seq_len": 4096}
    | {"titan_tune.data": "synthetic", "debug.moe_force_load_balance": True},
}  # fmt: skip
SMALL: Final = {f"{ARGS}dim": 64, f"{ARGS}n_layers": 4, f"{ARGS}n_heads": 4, f"{ARGS}n_kv_heads": 2}
SMALL_JOB: Final = SMALL | {f"{ARGS}vocab_size": 512, f"{ARGS}multiple_of": 32, "training.seq_len": 128}

PARALLEL: Final[Mapping[str, Mapping[str, Value]]] = {
    "fsdp": {},
    "ddp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
    "tp": {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2},
    "cp": {"data_parallel_shard_degree": 1, "context_parallel_degree": 2},
    "fsdpep": {"expert_parallel_degree": 2},
    "1f1b": {"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 2}
    | {"pipeline_parallel_schedule": "1F1B"},
    "interleaved": {"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 2}
    | {"pipeline_parallel_schedule": "Interleaved1F1B"},
}
AC: Final[Mapping[str, Mapping[str, Value]]] = {
    "none": {"activation_checkpoint.mode": "none"},
    "op": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
    "full": {"activation_checkpoint.mode": "full"},
}
FLOAT8: Final[Mapping[str, Value]] = {
    "model.converters": ["quantize.linear.float8"],
    "quantize.linear.float8.filter_fqns": ["output"],
}
FLOAT8_RECIPES: Final[Mapping[str, Mapping[str, Value]]] = {
    "bf16": {},
    "tw": FLOAT8,
    "rw": {**FLOAT8, "quantize.linear.float8.recipe_name": "rowwise"},
}

NAMES: Final = (
    # what says most of the model's throughput and of pipelines' memory comes first
    "1B-fsdp-b8-op-c-bf16", "1B-tp-b8-op-c-bf16", "1B-interleaved-b8-none-c-bf16", "1B-1f1b-b8-op-c-bf16",
    "1B-cp-b8-op-c-bf16", "8B-fsdp-b1-op-c-bf16", "1B-interleaved-b8-op-c-tw", "1B-ddp-b4-full-c-bf16",
    "8B-tp-b1-full-c-bf16", "8B-fsdp-b2-full-c-rw", "3B-fsdp-b2-none-c-bf16", "3B-1f1b-b8-full-c-bf16",
    "8B-cp-b1-full-c-bf16", "1B-fsdp-b4-op-e-bf16", "1B-tp-b4-none-c-tw", "moe-fsdpep-b2-full-e-bf16",
)  # fmt: skip


def values_of(name: str) -> dict[str, Value]:
    """The keys of ``model-layout-batch-AC-compile-float8``; TP, PP and CP without FSDP have bf16 parameters."""
    model, layout, batch, ac, compiled, float8 = name.split("-")
    parallel = PARALLEL[layout]
    sharded = parallel.get("data_parallel_shard_degree", -1) != 1
    return {
        **MODELS[model],
        "training.local_batch_size": int(batch[1:]),
        **AC[ac],
        "compile.enable": compiled == "c",
        **FLOAT8_RECIPES[float8],
        **{f"parallelism.{key}": value for key, value in parallel.items()},
        **({} if sharded or layout == "ddp" else {"training.dtype": "bfloat16"}),
    }


def shrunk(values: Mapping[str, Value]) -> dict[str, Value]:
    """The same for a processor."""
    small = (
        SMALL_JOB
        if values["model.name"] == "llama3"
        else {"model.flavor": "debugmodel", "training.seq_len": 128}
    )
    own = {key: value for key, value in values.items() if small is SMALL_JOB or not key.startswith(ARGS)}
    return {
        **own,
        **small,
        "compile.enable": False,
        "model.converters": [],
        "optimizer.implementation": "foreach",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = parse(arguments)
    machine = local_cluster()
    table = Table(options.output)
    done = {
        row["id"] for row in table.rows if "tokens_per_second_per_gpu" in row["real_run"] and row["ranks"]
    }
    begun = time.monotonic()
    left = [name for name in options.only or NAMES if name not in done]
    with Pairs(machine, options) as pairs:
        for start in range(0, len(left), pairs.dry.slots):
            if time.monotonic() - begun > options.seconds:
                break
            for row in pairs.rows(left[start : start + pairs.dry.slots]):
                table.add(row)
                print(f"{time.monotonic() - begun:5.0f} s  {describe(row)}", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = {"type": lambda text: text.split(","), "default": []}
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing new after this long"
    )
    parser.add_argument("--only", **listed, help="names, as in this file")
    parser.add_argument("--profile", **listed, help="names")
    parser.add_argument("--profile-slow", type=int, default=0, help="how many that are slower alone")
    parser.add_argument(
        "--devices", type=lambda text: text.split(","), default=["0", "1"], help="of dry runs"
    )
    parser.add_argument("--launcher", default="preloaded", choices=("preloaded", "torchrun"))
    parser.add_argument("--runs", type=Path, default=Path("runs/pairs"))
    return parser.parse_args(arguments)


class Pairs:
    """Both runners; a context manager."""

    def __init__(self, machine: ClusterSpec, options: argparse.Namespace) -> None:
        self.device = "cpu" if machine.gpu.is_cpu else "cuda"
        self.runs: Path = options.runs.absolute()
        self.cluster = machine.model_copy(update={"num_nodes": 1, "gpus_per_node": GPUS})
        self.real = LocalRunner(GPUS, self.device, launcher=options.launcher)
        alone = LocalRunner(1, self.device, launcher=options.launcher)
        devices = None if self.device == "cpu" else options.devices
        self.profiled: tuple[str, ...] = tuple(options.profile)
        self.slow_left: int = options.profile_slow
        self.dry = DryRunner(self.cluster, machine, ranks=ALL, devices=devices, runner=alone)

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *_: object) -> None:
        self.dry.close()
        self.real.close()

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The real jobs one by one, then the ranks of all of them as GPUs are free."""
        values = {name: self.values(name) for name in names}
        rows = [self.real_row(name, values[name]) for name in names]
        specs = [self.spec(name, values[name], "dry") for name in names]
        probes = [self.dry.start(spec) for spec in specs]
        for row, spec, probe in zip(rows, specs, probes, strict=True):
            outcome = finished(probe)
            row |= {"seconds": round(outcome.seconds, 1), "shared_gpu": False, "status": str(outcome.status)}
            row |= {"message": outcome.message, "ranks": dry_ranks(spec.directory)}
        for name, row in zip(names, rows, strict=True):
            if slow := self.slow_left > 0 and slower_alone(row):
                self.slow_left -= 1
            if slow or name in self.profiled:
                row["profile"] = {kind: self.profile(name, values[name], kind) for kind in ("real", "dry")}
        return rows

    def values(self, name: str) -> dict[str, Value]:
        """The layout's keys, on a processor of a smaller model."""
        values = values_of(name)
        return shrunk(values) if self.device == "cpu" else values

    def real_row(self, name: str, values: Mapping[str, Value]) -> dict[str, Any]:
        """The row with the real job's part."""
        spec = self.spec(name, values, "real")
        outcome = finished(self.real.start(spec))
        return {
            "id": name,
            "world_size": GPUS,
            "config": dict(values),
            "gpu": self.cluster.gpu.name,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            **{
                package: importlib.metadata.version(package) for package in ("torch", "torchtitan", "torchao")
            },
            "real_run": real_run(spec, outcome),
        }

    def spec(self, name: str, values: Mapping[str, Value], kind: str, *, profiled: bool = False) -> ProbeSpec:
        """The probe; steps enough for a median."""
        directory = self.runs / f"{name}-{kind}-{time.time_ns()}"
        steps, warmup = (PROFILED_STEPS, 1) if profiled else (STEPS, WARMUP_STEPS)
        settings = ProbeSettings(
            steps=steps, warmup_steps=warmup, min_measured_steps=steps - warmup, retries=0
        )
        job = job_from_text("", name=name).with_values(values)
        overrides = probe_values(job.resolved(), settings, directory, self.device)
        if profiled:
            overrides |= {"profiling.enable_profiling": True, "profiling.profile_freq": PROFILED_STEPS}
        resolved = resolve(job, self.cluster)
        tokens = resolved.global_batch_size * resolved.seq_len
        return ProbeSpec(
            config_id=name,
            directory=directory,
            toml=render(job, overrides),
            nproc_per_node=GPUS,
            device=self.device,
            settings=settings,
            cache_directory=self.runs / "cache",
            tokens_per_step_per_rank=tokens / GPUS,
        )

    def profile(self, name: str, values: Mapping[str, Value], kind: str) -> Any:
        """Milliseconds by stream and kernel of one step of rank 0, or why there are none."""
        spec = self.spec(name, values, kind, profiled=True)
        outcome = finished((self.real if kind == "real" else self.dry).start(spec))
        traces = sorted(spec.directory.rglob("rank0_trace.json"))
        return kernels(json.loads(traces[-1].read_text())["traceEvents"]) if traces else outcome.message


def slower_alone(row: Mapping[str, Any]) -> bool:
    """Whether a rank without peers took longer a step than the real job."""
    real = row["real_run"].get("step_seconds", [])[WARMUP_STEPS:]
    alone = [rank["step_seconds"][WARMUP_STEPS:] for rank in row["ranks"].values()]
    return bool(real and alone and all(alone)) and max(map(median, alone)) > median(real)


def finished(probe: Any) -> ProbeOutcome:
    """The outcome, waited for."""
    while (outcome := probe.poll()) is None:
        time.sleep(POLL_SECONDS)
    assert isinstance(outcome, ProbeOutcome)
    return outcome


def real_run(spec: ProbeSpec, outcome: ProbeOutcome) -> dict[str, Any]:
    """What the real job measured."""
    found: dict[str, Any] = {
        "status": str(outcome.status),
        "message": outcome.message,
        "seconds": round(outcome.seconds, 1),
    }
    if (m := outcome.measurement) is not None:
        metrics = files.Metrics(spec.directory)
        metrics.read_new()
        found |= {
            "tokens_per_second_per_gpu": round(m.tokens_per_second_per_gpu, 1),
            "interval": [round(x, 1) for x in m.interval],
            "active_bytes": [rank.active_bytes for rank in m.memory],
            "reserved_bytes": [rank.reserved_bytes for rank in m.memory],
            "step_seconds": seconds_of(metrics.slowest(spec.nproc_per_node)),
            "losses": [round(x, 5) for x in m.losses],
        }
    return found


def dry_ranks(directory: Path) -> dict[str, Any]:
    """What each simulated rank measured, as tests/data/h200_dry_runs.jsonl has it."""
    found = {}
    prefix = RANK_DIRECTORY.format("")
    for folder in sorted(directory.glob(f"{prefix}*")):
        rank = int(folder.name.removeprefix(prefix))
        count = folder / f"collectives.rank{rank}.json"
        if not count.exists():
            continue
        metrics = files.Metrics(folder)
        metrics.read_new()
        memory, record = metrics.memory()[0], json.loads(count.read_text())
        found[str(rank)] = {
            "active_bytes": memory.active_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "step_seconds": seconds_of(metrics.logs[rank].steps),
            "collectives": record["collectives"],
            "chunks": record["chunks"],
            "answer_seconds": record["answer_seconds"],
            "counted_step": record["step"],
        }
    return found


def seconds_of(steps: Iterable[StepRecord]) -> list[float]:
    """Of each step."""
    return [round(step.step_seconds, 5) for step in steps]


def kernels(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a Chrome trace: busy milliseconds by stream, and of the longest kernels by name with their counts."""
    streams: Counter[str] = Counter()
    milliseconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    steps = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            streams[str(event["args"].get("stream"))] += event["dur"] / 1e3
            milliseconds[event["name"][:120]] += event["dur"] / 1e3
            counts[event["name"][:120]] += 1
        elif event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep"):
            steps.append(event["dur"] / 1e3)
    return {
        "step_ms": [round(ms, 2) for ms in steps],
        "streams": {name: round(ms, 2) for name, ms in streams.most_common()},
        "kernels": [[name, round(ms, 3), counts[name]] for name, ms in milliseconds.most_common(KERNELS)],
    }


def describe(row: Mapping[str, Any]) -> str:
    """One line."""
    real = row["real_run"]
    speed = real.get("tokens_per_second_per_gpu")
    alone = [sorted(rank["step_seconds"])[len(rank["step_seconds"]) // 2] for rank in row["ranks"].values()]
    return f"{row['id']}: real {speed or real['message']}, alone {alone or row['message']} s"


if __name__ == "__main__":
    main()
