"""Dry runs against the real runs of the same jobs: reports/dry_run.md.

    python benchmarks/dry_run_accuracy.py [--print-fit]

Reads tests/data/h200_dry_runs.jsonl (one rank of N on one H200) and the real two-GPU rows: those made beside the
dry runs (benchmarks/dry_run_pairs.py, in the same row) and earlier ones (tests/data/h200_measured.jsonl,
tests/data/tables/llama3_1b_two_gpus.jsonl), of which memory alone is compared. Predicts anew from the raw step
times and collectives, so that the report follows the model. ``--print`` writes to the terminal instead;
``--print-fit`` fits the model's three constants to the pairs again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_tune.calibrate.rates import rates_of
from titan_tune.calibrate.result import Calibration
from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.calibration import MeasuredRates
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import RankMemory, StepRecord
from titan_tune.domain.settings import Settings
from titan_tune.estimate.collectives import OVERLAPPED, Cause, busy_seconds
from titan_tune.estimate.interconnect import interconnect_of
from titan_tune.probe.dry_run_model import Prediction, RankRun, predict, read_run
from titan_tune.titan.job import job_from_text
from titan_tune.titan.settings import resolve
from titan_tune.units import GIB

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
WARMUP_STEPS = 2
CALIBRATION = DATA / "h200_calibration.json"
BASE = "[model]\nname = 'llama3'\nflavor = 'debugmodel'\n"


@dataclass(frozen=True)
class Real:
    """A run of every rank."""

    active_gib: tuple[float, ...]
    reserved_gib: tuple[float, ...]
    tokens_per_second: float
    beside: bool = False
    """On the machine of the dry run, right before it."""


@dataclass(frozen=True)
class Dry:
    """A dry run of one or more ranks."""

    row: dict[str, Any]
    settings: Settings
    runs: tuple[RankRun, ...]
    prediction: Prediction

    @property
    def tokens_per_second(self) -> float:
        """Predicted, per GPU."""
        s = self.settings
        tokens = s.global_batch_size * s.seq_len / s.dims.world_size
        return tokens / self.prediction.step_seconds

    @property
    def layout(self) -> str:
        """What the job is, in a few words."""
        return describe(self.row["config"])


def main() -> None:
    """Write the report."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--print", action="store_true")
    options.add_argument("--output", type=Path, default=ROOT / "reports" / "dry_run.md")
    options.add_argument("--print-fit", action="store_true")
    given = options.parse_args()
    if given.print_fit:
        print(fit_text([(d, r) for d in dry_runs() if (r := real_of(d.row, {})) is not None]))
        return
    text = report(list(dry_runs()), real_runs())
    if given.print:
        print(text)
    else:
        given.output.write_text(text, encoding="utf-8")


def dry_runs() -> Iterator[Dry]:
    """Every recorded dry run, predicted anew."""
    for row in lines(DATA / "h200_dry_runs.jsonl"):
        world = row["world_size"]
        cluster = ClusterSpec(gpu=gpu_spec("h200"), num_nodes=max(1, world // 8), gpus_per_node=min(world, 8))
        settings = resolve(job_from_text(BASE, name=row["id"]).with_values(row["config"]), cluster)
        runs = tuple(run_of(int(rank), rank_row, settings) for rank, rank_row in row["ranks"].items())
        yield Dry(row, settings, runs, predict(settings, runs, interconnect_of(cluster)))


def run_of(rank: int, row: dict[str, Any], settings: Settings) -> RankRun:
    """A rank's record, read as the dry run reads it."""
    memory = RankMemory(rank, row["active_bytes"], row["reserved_bytes"], 0)
    steps = [
        StepRecord(i, 0.0, 0.0, seconds, 0.0, row["active_bytes"], row["reserved_bytes"], 0, 0, 0, 0.0)
        for i, seconds in enumerate(row["step_seconds"], start=1)
    ]
    record = {
        "rank": rank,
        "step": row["counted_step"],
        "collectives": row["collectives"],
        "chunks": row["chunks"] or [],
        "answer_seconds": row["answer_seconds"] or 0.0,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(record, file)
        file.flush()
        return read_run(Path(file.name), settings.dims, memory, steps, warmup=WARMUP_STEPS)


def real_runs() -> dict[str, Real]:
    """Real two-GPU runs by the name that dry runs give them."""
    found = {
        row["id"]: Real(tuple(row["active_gib"]), tuple(row["reserved_gib"]), row["median_tps_per_gpu"])
        for row in lines(DATA / "h200_measured.jsonl")
        if row["comm"] == "nccl" and row["world_size"] == 2
    }
    for row in lines(DATA / "tables" / "llama3_1b_two_gpus.jsonl"):
        if row.get("status") == "completed":
            found[f"table:{row['config_id']}"] = Real(
                tuple(m[1] / GIB for m in row["memory"]),
                tuple(m[2] / GIB for m in row["memory"]),
                row["tokens_per_second_per_gpu"],
            )
    return found


def real_of(row: dict[str, Any], others: dict[str, Real]) -> Real | None:
    """The real run of a dry run's row: the one beside it, or one of ``others``."""
    own = row.get("real_run", {})
    if "active_bytes" in own:
        active, reserved = (tuple(b / GIB for b in own[f"{kind}_bytes"]) for kind in ("active", "reserved"))
        return Real(active, reserved, own["tokens_per_second_per_gpu"], beside=True)
    return others.get(row.get("real"))


def report(dry: list[Dry], real: dict[str, Real]) -> str:
    """The whole page."""
    pairs = [(d, r) for d in dry if (r := real_of(d.row, real)) is not None]
    beside = [(d, r) for d, r in pairs if r.beside]
    earlier = [(d, r) for d, r in pairs if not r.beside]
    speeds = [(d.settings, errors(d, r)[2]) for d, r in beside]
    flat = [abs(e) for s, e in speeds if s.dims.tp == s.dims.pp == s.dims.ep == 1]
    others = [abs(e) for s, e in speeds if s.dims.tp > 1 or s.dims.pp > 1]
    out = [
        "# Dry runs: one rank of N GPUs on one H200",
        "",
        "Written by `python benchmarks/dry_run_accuracy.py` from `tests/data/h200_dry_runs.jsonl`. NVIDIA H200, torch"
        " 2.11.0+cu130, torchtitan 0.2.2, torchao 0.17.0, `expandable_segments:True`, 2026-11-30.",
        "",
        "## Against real two-GPU runs of the same jobs",
        "",
        "Real job on two GPUs, then each of its ranks alone on one, on one machine with nothing else on it"
        " (`benchmarks/dry_run_pairs.py`).",
        "",
        *memory_table(beside),
        "",
        "What is left is Interleaved1F1B: the real rank holds one to three hidden states of 16 MiB more. Probably"
        " because a message keeps its memory until the peer has taken it, and without a peer it is over at once. The"
        " reserved peak of a pipeline follows.",
        "",
        "### Throughput",
        "",
        f"FSDP, DDP and CP: within {max(flat):.1f} %. TP and PP: within {max(others):.1f} %. Three constants of the"
        " model were fitted to these pairs (`--print-fit` fits them again and leaves each pair out in turn), and the"
        " treatment of a pipeline whose steps vary was chosen with them in sight; what was predicted before was within"
        " 3.3 % (FSDP, DDP, CP), 1.4 % (TP) and 12.9 % (PP).",
        "",
        *speed_table(beside),
        "",
        "EP stays 10 % too fast: eager kernels, whose time varied by a quarter from step to step in the real job and by"
        " a seventh alone (0.21 to 0.25 s, 0.18 to 0.21 s), and every layer waits for counts from its peer. One such"
        " layout was measured; nothing was fitted to it. Two ranks and NVLink are all that these constants have seen.",
        "",
        "### Earlier pairs",
        "",
        "Real runs of other hosts and days, dry runs beside other work on their host: memory alone is compared. On that"
        " host a rank alone was slower than the real job on its own; with nothing beside it, above, it never is.",
        "",
        *memory_table(earlier),
        "",
        *large(dry),
        "## Cost",
        "",
        "Seconds from launch to the outcome, preloaded launcher. Pipelines: their ranks side by side on two GPUs in the"
        " pairs, one after the other in the other rows. Compile caches hold what the real job compiled in the pairs,"
        " and are cold for the first job of a kind elsewhere:",
        "",
        "| job | ranks run | seconds |",
        "|---|---|---|",
        *(f"| {d.layout} | {len(d.runs)} | {d.row['seconds']:.0f} |" for d in dry if not d.row["shared_gpu"]),
        "",
        "The preloaded launcher forks each rank from a process that has imported torch and torchtitan: the peaks are"
        " those of a fresh process to the byte (active, reserved and device of a 1B run on an H200 launched both ways),"
        " and imports are paid once. Several dry runs inside one process are not made: what the first leaves in the"
        " allocator and in Dynamo's caches would be the second's.",
        "",
    ]
    return "\n".join(out)


def fit_text(pairs: list[tuple[Dry, Real]]) -> str:
    """The constants of ``dry_run_model`` by least squares of relative errors, and how far pairs left out are: for the
    catalogue's links, then for those of the calibration of such a machine."""
    rates = rates_of(Calibration.model_validate_json(CALIBRATION.read_text(encoding="utf-8")))
    return "\n".join(line for links in (None, rates) for line in fit_lines(pairs, links))


def fit_lines(pairs: list[tuple[Dry, Real]], rates: MeasuredRates | None) -> Iterator[str]:
    """For the links of ``rates``, or the catalogue's."""
    flat, tp = [], []
    for dry, real in pairs:
        dims, cluster = dry.settings.dims, dry.settings.cluster.model_copy(update={"rates": rates})
        if dims.pp == dims.ep == 1:
            busy = busy_seconds(dry.runs[0].collectives, interconnect_of(cluster))
            beside = sum(busy.get(cause, 0.0) for cause in OVERLAPPED)
            point = Point(dry.layout, real_seconds(dry, real), dry.prediction.compute_seconds, beside, busy)
            (tp if dims.tp > 1 else flat).append(point)
    overlapped, slowest = fitted(flat)
    shares = [(p.real - (1 + slowest) * p.compute) / p.busy[Cause.TP] for p in tp]
    yield f"overlapped {overlapped:.3f}, slowest rank {slowest:.4f}, tensor parallel {sum(shares) / len(shares):.2f}"
    for i, point in enumerate(flat):
        left = fitted(flat[:i] + flat[i + 1 :])
        found = [percent(point.real, step(point, *constants)) for constants in ((overlapped, slowest), left)]
        yield f"{found[0]:+6.2f} %  left out {found[1]:+6.2f} %  {point.layout}"


class Point(NamedTuple):
    """One pair without a pipeline, seconds a step."""

    layout: str
    real: float
    compute: float
    beside: float
    """Communication that runs beside computing."""
    busy: dict[Cause, float]


def fitted(points: list[Point]) -> tuple[float, float]:
    """Share of the communication beside computing, and of the computing, that is added."""
    rows = np.array([[p.beside / p.real, p.compute / p.real] for p in points])
    added = np.array([(p.real - p.compute - p.busy.get(Cause.CP, 0.0)) / p.real for p in points])
    share, slowest = np.linalg.lstsq(rows, added, rcond=None)[0]
    return float(share), float(slowest)


def step(point: Point, share: float, slowest: float) -> float:
    """Seconds by the model."""
    return (1 + slowest) * point.compute + share * point.beside + point.busy.get(Cause.CP, 0.0)


def real_seconds(dry: Dry, real: Real) -> float:
    """Of a step of the real job."""
    s = dry.settings
    return s.global_batch_size * s.seq_len / s.dims.world_size / real.tokens_per_second


def memory_table(pairs: list[tuple[Dry, Real]]) -> Iterator[str]:
    """How far peaks are, in words and by rank."""
    active, reserved, _ = zip(*(errors(d, r) for d, r in pairs), strict=True)
    flat_active = [e for es in active for e in es]
    flat_reserved = [e for es in reserved for e in es]
    yield (
        f"{len(pairs)} layouts, {len(flat_active)} ranks. Active peak: worst {worst(flat_active)}, mean"
        f" {mean(flat_active):.2f} %. Reserved peak: worst {worst(flat_reserved)}, mean {mean(flat_reserved):.2f} %."
    )
    yield ""
    yield "| job | rank | active GiB, real | dry run | | reserved GiB, real | dry run | |"
    yield "|---|---|---|---|---|---|---|---|"
    for d, r in pairs:
        yield from memory_lines(d, r)


def errors(dry: Dry, real: Real) -> tuple[list[float], list[float], float]:
    """Percent by rank of active and reserved, and percent of throughput."""
    active, reserved = [], []
    for run in dry.runs:
        active.append(percent(run.memory.active_bytes / GIB, real.active_gib[run.rank]))
        reserved.append(percent(run.memory.reserved_bytes / GIB, real.reserved_gib[run.rank]))
    return active, reserved, percent(dry.tokens_per_second, real.tokens_per_second)


def memory_lines(dry: Dry, real: Real) -> Iterator[str]:
    """A line a rank."""
    for run in dry.runs:
        a, b = run.memory.active_bytes / GIB, real.active_gib[run.rank]
        c, e = run.memory.reserved_bytes / GIB, real.reserved_gib[run.rank]
        yield (
            f"| {dry.layout} | {run.rank} | {b:.3f} | {a:.3f} | {percent(a, b):+.2f} %"
            f" | {e:.3f} | {c:.3f} | {percent(c, e):+.2f} % |"
        )


def speed_table(pairs: list[tuple[Dry, Real]]) -> Iterator[str]:
    """A line a pair."""
    yield "tokens/s per GPU, and milliseconds of a step:"
    yield ""
    yield "| job | real | compute alone | predicted | | communication | slowest rank | bubble |"
    yield "|---|---|---|---|---|---|---|---|"
    for dry, real in pairs:
        yield speed_line(dry, real, errors(dry, real)[2])


def speed_line(dry: Dry, real: Real, error: float) -> str:
    """One job."""
    p, s = dry.prediction, dry.settings
    compute = s.global_batch_size * s.seq_len / s.dims.world_size / p.compute_seconds
    return (
        f"| {dry.layout} | {real.tokens_per_second:,.0f} | {compute:,.0f} | {dry.tokens_per_second:,.0f}"
        f" | {error:+.1f} % | {p.communication_seconds * 1e3:.0f} | {p.waiting_seconds * 1e3:.0f}"
        f" | {p.bubble_seconds * 1e3:.0f} |"
    )


def large(dry: list[Dry]) -> Iterator[str]:
    """Jobs of many GPUs beside what was published of them."""
    yield "## Jobs of many GPUs"
    yield ""
    yield "| job | GPUs | rank | active GiB | reserved GiB | step s, compute | predicted tokens/s per GPU |"
    yield "|---|---|---|---|---|---|---|"
    for d in dry:
        if d.row["world_size"] >= 256:
            for run in d.runs:
                yield (
                    f"| {d.layout} | {d.row['world_size']} | {run.rank} | {run.memory.active_bytes / GIB:.1f}"
                    f" | {run.memory.reserved_bytes / GIB:.1f} | {run.step_seconds:.1f} | {d.tokens_per_second:,.0f} |"
                )
    yield ""
    yield (
        "Published for Llama 3.1 70B, 256 H100s (96 GB HBM2e, 500 W), FSDP 32 x TP 8, local batch 16, full activation"
        " checkpointing, compile: 67.6 GiB reserved and 876 tokens/s with float8 and async TP (torchtitan 9dec370,"
        " December 2024), 810 with float8 alone (June 2025). The dry run is bf16 without async TP on torchtitan 0.2.2,"
        " whose loss is compiled: that commit kept fp32 logits of 16 x 8192 tokens, 7.8 GiB a copy on each of eight TP"
        " ranks. Its received tensors were not filled yet, so losses were not finite and the speed of the matmuls on"
        " them is in doubt. The GPUs differ: an H200 has twice the memory bandwidth and 200 W more."
    )
    yield ""
    yield (
        "Published for Llama 3.1 405B, 512 H100s, FSDP 8 x TP 8 x PP 8, 1F1B, full activation checkpointing, compile,"
        " float8, async TP: 75.3 GiB and 76 tokens/s at sequence 32768 with local batch 8 (December 2024). The dry run"
        " has the same tokens a step, sequence 8192 with local batch 32, no async TP and a compiled loss; attention"
        " costs a quarter. Each of its three ranks took about 90 s."
    )
    yield ""


def describe(config: dict[str, Any]) -> str:
    """Model, layout, activation checkpointing, compile and float8 of a job."""
    p = "parallelism."
    degrees = {
        "DDP": config.get(p + "data_parallel_replicate_degree", 1),
        "FSDP": config.get(p + "data_parallel_shard_degree", -1),
        "TP": config.get(p + "tensor_parallel_degree", 1),
        "CP": config.get(p + "context_parallel_degree", 1),
        "PP": config.get(p + "pipeline_parallel_degree", 1),
    }
    others = degrees["DDP"] * degrees["TP"] * degrees["CP"] * degrees["PP"]
    if degrees["FSDP"] == -1 and others == 1:
        degrees["FSDP"] = 2
    degrees["EP"] = config.get(p + "expert_parallel_degree", 1)
    layout = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    if degrees["PP"] > 1:
        layout += f" {config.get(p + 'pipeline_parallel_schedule', '1F1B')}"
    mode = config.get("activation_checkpoint.mode", "selective")
    ac = "op" if mode == "selective" else mode
    float8 = ""
    if "quantize.linear.float8" in config.get("model.converters", []):
        recipe = config.get("quantize.linear.float8.recipe_name") or "tensorwise"
        gather = config.get("quantize.linear.float8.enable_fsdp_float8_all_gather")
        float8 = f", float8 {recipe}" + (" with all-gather" if gather else "")
    run = "compile" if config.get("compile.enable") else "eager"
    kind = ", bf16 parameters" if config.get("training.dtype") == "bfloat16" else ""
    size = f"batch {config.get('training.local_batch_size', 8)} x {config['training.seq_len']}"
    return f"{config['model.flavor']} {layout}, AC {ac}, {run}{float8}{kind}, {size}"


def lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def percent(value: float, truth: float) -> float:
    """Relative error in percent."""
    return 100 * (value / truth - 1)


def worst(values: list[float]) -> str:
    """The largest in size."""
    return f"{max(values, key=abs):+.2f} %"


def mean(values: list[float]) -> float:
    """Of sizes."""
    return sum(map(abs, values)) / len(values)


if __name__ == "__main__":
    main()
