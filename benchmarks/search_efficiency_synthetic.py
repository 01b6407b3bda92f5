"""Made-up tables to develop a search on: no number here was measured, and none goes into a report.

Each table is a real space (its candidates, rules, memory and step-time estimates) with a made-up truth: the step-time
model with other constants, effects of labels and of their pairs, a remainder of every candidate's own, compile modes
that help or hurt, configurations near the memory limit that run slower or not at all, a combination that
does not compile. Many of them, with different draws, so that a search is tuned to none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from itertools import combinations

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import Verdict
from titan_tune.domain.probe import ProbeStatus
from titan_tune.estimate.step_time import CONSTANTS, Constants, estimate_step_time
from titan_tune.space.default import space_from_job
from titan_tune.study.plan import Plan, Ranked, make_plan
from titan_tune.study.table import MeasuredTable, TableHeader, TableRow
from titan_tune.titan.job import job_from_text

JOB = """
[model]
name = "llama3"
flavor = "{flavor}"
{shape}
[titan_tune]
data = "synthetic"
[training]
seq_len = {seq_len}
local_batch_size = {local_batch}
global_batch_size = {global_batch}
{dtype}
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
SHAPES = {
    "1B": "[titan_tune.model_args]\ndim=2048\nn_layers=16\nn_heads=32\nn_kv_heads=8\nffn_dim_multiplier=1.5\n"
    "multiple_of=256\nvocab_size=128256\nrope_theta=500000",
    "3B": "[titan_tune.model_args]\ndim=3072\nn_layers=28\nn_heads=24\nn_kv_heads=8\nffn_dim_multiplier=1.0\n"
    "multiple_of=256\nvocab_size=128256\nrope_theta=500000",
    "8B": "",
    "70B": "",
}
AC = ["none", "selective-op", "selective-2", "full", "memory_budget-0.5"]
MODES = ["off", "default", "max-autotune", "reduce-overhead"]
LAYOUTS = [
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2, "schedule": "1F1B"},
    {"pp": 2, "schedule": "Interleaved1F1B"},
]
SPACES: dict[str, dict[str, object]] = {
    "1b-one": {
        "flavor": "1B",
        "gpus": 1,
        "seq_len": 4096,
        "local_batch": 4,
        "global_batch": 8,
        "axes": {
            "activation_checkpoint": ["none", "selective-op", "full"],
            "compile": ["off", "default", "reduce-overhead"],
            "float8": ["off", "tensorwise", "rowwise"],
            "local_batch_size": [2, 4, 8],
        },
    },
    "1b-one-wide": {
        "flavor": "1B",
        "gpus": 1,
        "seq_len": 4096,
        "local_batch": 4,
        "global_batch": 16,
        "axes": {
            "activation_checkpoint": AC,
            "compile": MODES,
            "float8": ["off", "tensorwise", "rowwise"],
            "local_batch_size": [2, 8, 16],
        },
    },
    "3b-one": {
        "flavor": "3B",
        "gpus": 1,
        "seq_len": 4096,
        "local_batch": 2,
        "global_batch": 8,
        "axes": {
            "activation_checkpoint": AC,
            "compile": ["off", "default", "max-autotune"],
            "float8": ["off", "tensorwise", "rowwise"],
            "local_batch_size": [1, 2, 4],
        },
    },
    "1b-two": {
        "flavor": "1B",
        "gpus": 2,
        "seq_len": 4096,
        "local_batch": 8,
        "global_batch": 16,
        "dtype": 'dtype = "bfloat16"',
        "axes": {
            "activation_checkpoint": ["none", "selective-op", "full"],
            "compile": ["off", "default"],
            "float8": ["off", "tensorwise"],
            "parallelism": LAYOUTS,
            "local_batch_size": [8],
        },
    },
    "8b-two": {
        "flavor": "8B",
        "gpus": 2,
        "seq_len": 8192,
        "local_batch": 1,
        "global_batch": 8,
        "axes": {
            "activation_checkpoint": ["selective-op", "selective-2", "full"],
            "compile": ["default", "max-autotune"],
            "float8": ["off", "tensorwise", "rowwise", "tensorwise-fsdp_all_gather"],
            "parallelism": [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}],
            "local_batch_size": [1, 2],
        },
    },
    "8b-eight": {
        "flavor": "8B",
        "gpus": 8,
        "gpu": "h100-80gb",
        "seq_len": 8192,
        "local_batch": 1,
        "global_batch": 32,
        "axes": {
            "activation_checkpoint": ["none", "selective-op", "full"],
            "compile": ["off", "default"],
            "parallelism": [
                {"dp_shard": 8},
                {"dp_replicate": 2, "dp_shard": 4},
                {"dp_shard": 4, "tp": 2},
                {"dp_shard": 2, "tp": 4},
                {"tp": 8},
                {"dp_shard": 4, "cp": 2},
                {"dp_shard": 4, "pp": 2, "schedule": "1F1B"},
                {"dp_shard": 2, "pp": 4, "schedule": "Interleaved1F1B"},
            ],
            "local_batch_size": [1, 2, 4],
        },
    },
}
START_SECONDS = {"off": 8.0, "default": 40.0, "max-autotune": 150.0, "reduce-overhead": 50.0}
"""To the first step beyond imports and init, by compile mode."""


def plan_of(name: str) -> Plan:
    """The plan of one space."""
    return plan_from(name, SPACES[name])


def plan_from(name: str, entry: Mapping[str, object]) -> Plan:
    """The plan of a space written like those in ``SPACES``; ``gpus`` counts those of each of its ``nodes``."""
    flavor = str(entry["flavor"])
    text = JOB.format(shape=SHAPES[flavor], **{"dtype": "", **entry})
    cluster = ClusterSpec(
        gpu=gpu_spec(str(entry.get("gpu", "h200"))),
        gpus_per_node=int(str(entry["gpus"])),
        num_nodes=int(str(entry.get("nodes", 1))),
    )
    return make_plan(space_from_job(job_from_text(text, name=name), cluster, axes=entry["axes"]))  # type: ignore[arg-type]


def tables(*, draws: int, seed: int = 0) -> Iterator[tuple[Plan, MeasuredTable]]:
    """Every space with ``draws`` made-up truths."""
    for name in SPACES:
        plan = plan_of(name)
        for draw in range(draws):
            yield plan, make_table(plan, f"{name}#{draw}", seed=f"{seed}-{name}-{draw}")


class _Truth:
    """What a plan's candidates would measure, were the world as drawn."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self._rng = rng
        wrong, effect = rng.choice([0.05, 0.12, 0.25]), rng.choice([0.01, 0.03, 0.06])
        self._constants = Constants(*(value * math.exp(rng.gauss(0.0, wrong)) for value in CONSTANTS))
        labels = [(axis, label) for axis, values in plan.labels().items() for label in values]
        self._effects = {label: rng.gauss(0.0, effect) for label in labels}
        self._pairs = {frozenset(pair): rng.gauss(0.0, effect / 3) for pair in combinations(labels, 2)}
        self._own = rng.choice([0.003, 0.01, 0.02])
        self._offset = rng.gauss(-0.03, 0.08)
        self._effects["compile", "max-autotune"] = self._effects.get(
            ("compile", "default"), 0.0
        ) + rng.uniform(-0.01, 0.04)
        self._broken = set(rng.choice(list(self._pairs))) if rng.random() < 0.3 else None

    def log_speed(self, item: Ranked) -> float:
        chosen = list(item.candidate.choices.items())
        total = self._offset + math.log(
            estimate_step_time(item.candidate.settings, self._constants).tokens_per_second_per_gpu
        )
        total += sum(self._effects.get(label, 0.0) for label in chosen)
        total += sum(self._pairs.get(frozenset(pair), 0.0) for pair in combinations(chosen, 2))
        if item.verdict is Verdict.PRESSURE:
            total += math.log(self._rng.uniform(0.7, 1.0))
        return total + self._rng.gauss(0.0, self._own)

    def status(self, item: Ranked) -> ProbeStatus:
        if item.verdict is Verdict.PRESSURE and self._rng.random() < 0.5:
            return ProbeStatus.OOM
        if self._broken and self._broken <= set(item.candidate.choices.items()):
            return ProbeStatus.COMPILE_FAILURE
        return ProbeStatus.COMPLETED


def make_table(plan: Plan, name: str, *, seed: str) -> MeasuredTable:
    """One made-up table over every candidate of a plan."""
    rng = random.Random(seed)
    truth = _Truth(plan, rng)
    space = plan.space
    tokens = space.global_batch_size * int(space.base.get("training.seq_len")) / space.cluster.world_size
    layers = space.base.model.n_layers / 16
    rows = []
    for item in plan.by_id.values():
        choices = item.candidate.choices
        is_baseline = plan.baseline is not None and item is plan.by_id[plan.baseline.candidate.config_id]
        status = ProbeStatus.COMPLETED if is_baseline else truth.status(item)
        start = 20.0 + layers * START_SECONDS.get(choices.get("compile", "off"), 10.0) * rng.uniform(0.8, 1.2)
        if choices.get("float8", "off") != "off":
            start += 10.0
        row = {
            "config_id": item.candidate.config_id,
            "choices": dict(choices),
            "status": status,
            "time_to_first_step": start,
            "seconds": start + 3.0,
        }
        speed = math.exp(truth.log_speed(item))
        if status is ProbeStatus.COMPLETED:
            steps = [speed * math.exp(rng.gauss(0.0, 0.01)) for _ in range(12)]
            row |= {
                "tokens_per_second_per_gpu": sorted(steps)[6],
                "step_tokens_per_second": steps,
                "seconds": start + 16 * tokens / speed + 5.0,
            }
        rows.append(TableRow.model_validate(row))
    header = TableHeader(
        kind="table",
        space=name,
        gpu=space.cluster.gpu.name,
        gpus=space.cluster.world_size,
        date="made up",
        torch="none",
        baseline=plan.baseline.candidate.config_id if plan.baseline else None,
    )
    return MeasuredTable(name, header, tuple(rows))
