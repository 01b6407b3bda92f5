"""Made-up tables where the step-time model is wrong in known ways, for search_efficiency_scenarios.py.

Each is a real space (its candidates, rules, memory and step-time estimates) with a made-up truth: what the step-time
model says, small errors of every label, pair of labels and candidate, and one large error that is aimed at what the
model thinks best. No number here was measured.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

from search_efficiency import case_of
from search_efficiency_rivals import Case
from search_efficiency_synthetic import SPACES, START_SECONDS, plan_from

from titan_tune.domain.probe import ProbeStatus
from titan_tune.study.plan import Plan, Ranked
from titan_tune.study.table import MeasuredTable, TableHeader, TableRow

EIGHT_GPUS = [
    {"dp_shard": 8},
    {"dp_replicate": 2, "dp_shard": 4},
    {"dp_shard": 4, "tp": 2},
    {"dp_shard": 4, "cp": 2},
    {"dp_shard": 4, "pp": 2, "schedule": "1F1B"},
    {"dp_shard": 4, "pp": 2, "schedule": "Interleaved1F1B"},
]
MANY_GPUS = [
    {"dp_shard": 64},
    {"dp_replicate": 8, "dp_shard": 8},
    {"dp_shard": 32, "tp": 2},
    {"dp_shard": 16, "tp": 4},
    {"dp_shard": 8, "tp": 8},
    {"dp_shard": 32, "cp": 2},
    {"dp_shard": 32, "pp": 2, "schedule": "1F1B"},
    {"dp_shard": 16, "pp": 4, "schedule": "Interleaved1F1B"},
    {"dp_shard": 8, "tp": 2, "pp": 4, "schedule": "1F1B"},
]
USUAL = {
    "activation_checkpoint": ["none", "selective-op", "full"],
    "compile": ["off", "default", "max-autotune"],
    "float8": ["off", "tensorwise", "rowwise"],
}
FIELD: Mapping[str, Mapping[str, object]] = {
    "1B, one H200": SPACES["1b-one-wide"],
    "3B, 8 H200": {
        "flavor": "3B",
        "gpus": 8,
        "gpu": "h200",
        "seq_len": 8192,
        "local_batch": 2,
        "global_batch": 64,
        "axes": {**USUAL, "parallelism": EIGHT_GPUS, "local_batch_size": [1, 2, 4]},
    },
    "8B, 8 A100": {
        "flavor": "8B",
        "gpus": 8,
        "gpu": "a100-80gb",
        "seq_len": 4096,
        "local_batch": 1,
        "global_batch": 64,
        "axes": {
            "activation_checkpoint": ["none", "selective-op", "selective-2", "full"],
            "compile": ["off", "default", "max-autotune"],
            "parallelism": EIGHT_GPUS,
            "local_batch_size": [1, 2, 4],
        },
    },
    "8B, 64 H100": {
        "flavor": "8B",
        "gpus": 8,
        "nodes": 8,
        "gpu": "h100-80gb",
        "seq_len": 8192,
        "local_batch": 1,
        "global_batch": 256,
        "axes": {**USUAL, "parallelism": MANY_GPUS, "local_batch_size": [1, 2]},
    },
    "70B, 64 H200": {
        "flavor": "70B",
        "gpus": 8,
        "nodes": 8,
        "gpu": "h200",
        "seq_len": 8192,
        "local_batch": 1,
        "global_batch": 256,
        "axes": {**USUAL, "parallelism": MANY_GPUS, "local_batch_size": [1, 2]},
    },
}
SMALL_LABEL, SMALL_PAIR, SMALL_OWN = 0.02, 0.007, 0.007
"""Standard deviations of the errors in the logarithm that every table has."""
RUN_NOISE, STEP_NOISE = 0.005, 0.01

Label = tuple[str, str]


@dataclass
class World:
    """A truth about a plan, begun with the small errors; scenarios add the large one."""

    plan: Plan
    rng: random.Random
    effects: dict[Label, float] = field(default_factory=dict)
    pairs: dict[frozenset[Label], float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    offset: float = 0.0
    failing: Callable[[Ranked], bool] = lambda item: False
    slow_start: dict[str, float] = field(default_factory=dict)
    """Factor of the seconds to the first step, by compile mode."""
    flat: bool = False
    """The model says the same of every candidate, as where no formula covers it."""
    run_noise: float = RUN_NOISE

    def __post_init__(self) -> None:
        labels = [(axis, label) for axis, values in self.plan.labels().items() for label in values]
        self.effects = {label: self.rng.gauss(0.0, SMALL_LABEL) for label in labels}
        self.pairs = {
            frozenset(pair): self.rng.gauss(0.0, SMALL_PAIR)
            for pair in combinations(labels, 2)
            if pair[0][0] != pair[1][0]
        }
        self.own = {config: self.rng.gauss(0.0, SMALL_OWN) for config in self.plan.by_id}

    @cached_property
    def ranked(self) -> list[Ranked]:
        """Best prediction first."""
        return sorted(
            self.plan.by_id.values(), key=lambda r: (-r.predicted_tokens_per_second, r.candidate.config_id)
        )

    @property
    def favourite(self) -> list[Label]:
        """The choices of the best prediction."""
        return list(self.ranked[0].candidate.choices.items())

    def others(self, axis: str) -> list[Label]:
        """The labels of an axis that the best prediction has not."""
        chosen = self.ranked[0].candidate.choices[axis]
        return [(axis, label) for label in self.plan.labels()[axis] if label != chosen]

    def speed(self, item: Ranked) -> float:
        """Tokens/s per GPU."""
        chosen = list(item.candidate.choices.items())
        log = self.offset + sum(self.effects[label] for label in chosen)
        log += sum(self.pairs.get(frozenset(pair), 0.0) for pair in combinations(chosen, 2))
        return item.predicted_tokens_per_second * math.exp(log + self.own[item.candidate.config_id])

    def scale(self, axis: str, wanted: Callable[[str], bool], factor: float) -> None:
        """Make all that has such a label faster or slower."""
        for label in self.plan.labels().get(axis, ()):
            if wanted(label):
                self.effects[axis, label] += math.log(factor)


def label_slow(world: World) -> None:
    """A label of the predicted best is 20 % slower than predicted"""
    world.effects[world.rng.choice(world.favourite)] -= 0.2


def label_fast(world: World) -> None:
    """A label that the predicted best has not is 20 % faster than predicted"""
    axes = [axis for axis, _ in world.favourite if world.others(axis)]
    world.effects[world.rng.choice(world.others(world.rng.choice(axes)))] += 0.2


def interactions(world: World) -> None:
    """Every pair of labels is off by 10 % up or down"""
    for pair in world.pairs:
        world.pairs[pair] += world.rng.choice([-0.1, 0.1])


def interaction_of_the_best(world: World) -> None:
    """Two pairs of labels of the predicted best are 10 % slower, another of its labels 10 % faster in a pair"""
    pairs = [frozenset(pair) for pair in combinations(world.favourite, 2)]
    for pair in world.rng.sample(pairs, 2):
        world.pairs[pair] -= 0.1
    near = [pair for pair in world.pairs if len(pair & set(world.favourite)) == 1]
    for pair in world.rng.sample(near, 4):
        world.pairs[pair] += 0.1


def all_slower(world: World) -> None:
    """Everything is 40 % slower than predicted"""
    world.offset = math.log(0.6)


def all_faster(world: World) -> None:
    """Everything is 40 % faster than predicted"""
    world.offset = math.log(1.4)


def mode_fails(world: World) -> None:
    """The predicted best's compile mode fails on two of three AC modes or layouts, its own among them"""
    mode = dict(world.favourite)["compile"]
    axis = "parallelism" if "parallelism" in dict(world.favourite) else "activation_checkpoint"
    labels = world.plan.labels()[axis]
    broken = {dict(world.favourite)[axis], *world.rng.sample(labels, (2 * len(labels)) // 3)}
    world.failing = lambda item: (
        item.candidate.choices["compile"] == mode and item.candidate.choices[axis] in broken
    )


def label_fails(world: World) -> None:
    """Everything with one of the predicted best's labels fails"""
    label = world.rng.choice([(axis, label) for axis, label in world.favourite if world.others(axis)])
    world.failing = lambda item: item.candidate.choices[label[0]] == label[1]


def dear_mode(world: World) -> None:
    """max-autotune takes five times as long to its first step and gains 2 % over default"""
    world.slow_start = {"max-autotune": 5.0}
    world.effects["compile", "max-autotune"] = world.effects["compile", "default"] + 0.02


def dear_useless_mode(world: World) -> None:
    """max-autotune takes five times as long to its first step and loses 2 %"""
    world.slow_start = {"max-autotune": 5.0}
    world.effects["compile", "max-autotune"] = world.effects["compile", "default"] - 0.02


def no_float8(world: World) -> None:
    """float8 is worth nothing: as fast as bf16, or 5 % slower"""
    for item in world.ranked:
        mode = item.candidate.choices.get("float8", "off")
        if mode != "off":
            plain = {**item.candidate.choices, "float8": "off"}
            twin = next((r for r in world.ranked if dict(r.candidate.choices) == plain), item)
            gap = math.log(twin.predicted_tokens_per_second / item.predicted_tokens_per_second)
            world.own[item.candidate.config_id] += gap - 0.025


def pipeline_great(world: World) -> None:
    """Pipelines are 30 % faster than predicted"""
    world.scale("parallelism", lambda label: "pp=" in label, 1.3)


def pipeline_useless(world: World) -> None:
    """Pipelines are 30 % slower than predicted, tensor parallelism 15 % faster"""
    world.scale("parallelism", lambda label: "pp=" in label, 0.7)
    world.scale("parallelism", lambda label: "tp=" in label, 1.15)


def batches_backwards(world: World) -> None:
    """Every doubling of the local batch loses 10 % against the prediction"""
    for label in filter(str.isdigit, world.plan.labels()["local_batch_size"]):
        world.effects["local_batch_size", label] -= 0.1 * math.log2(float(label))


def some_fail(world: World) -> None:
    """15 % of the candidates fail for lack of memory although they were predicted to fit, the predicted best too"""
    broken = set(world.rng.sample(sorted(world.plan.by_id), round(0.15 * len(world.plan.by_id))))
    broken.add(world.ranked[0].candidate.config_id)
    world.failing = lambda item: item.candidate.config_id in broken


def memory_underestimated(world: World) -> None:
    """The 25 % that are predicted to need most memory fail"""
    need = {c: r.memory.active_bytes if r.memory else 0.0 for c, r in world.plan.by_id.items()}
    limit = sorted(need.values())[3 * len(need) // 4]
    world.failing = lambda item: need[item.candidate.config_id] > limit


def noise_of_one_percent(world: World) -> None:
    """Runs of one configuration differ by 1 %"""
    world.run_noise = 0.01


def noise_of_three_percent(world: World) -> None:
    """Runs of one configuration differ by 3 %"""
    world.run_noise = 0.03


def rough(world: World) -> None:
    """Every label is off by 10 %, every pair by 3 %, every candidate by 2 %"""
    for label in world.effects:
        world.effects[label] += world.rng.gauss(0.0, 0.1)
    for pair in world.pairs:
        world.pairs[pair] += world.rng.gauss(0.0, 0.03)
    for config in world.own:
        world.own[config] += world.rng.gauss(0.0, 0.02)


def own_remainders(world: World) -> None:
    """Every candidate is off by 5 % of its own, which nothing else tells"""
    for config in world.own:
        world.own[config] += world.rng.gauss(0.0, 0.05)


def all_at_once(world: World) -> None:
    """A slow label, a fast one, failures, 30 % slower than predicted, 1.5 % between runs"""
    label_slow(world)
    label_fast(world)
    some_fail(world)
    world.offset, world.run_noise = math.log(0.7), 0.015


def no_model(world: World) -> None:
    """No formula covers the model: nothing is predicted"""
    world.flat = True


Scenario = Callable[[World], None]
SCENARIOS: tuple[Scenario, ...] = (
    label_slow, label_fast, interactions, interaction_of_the_best, all_slower, all_faster, mode_fails, label_fails,
    dear_mode, dear_useless_mode, no_float8, pipeline_great, pipeline_useless, batches_backwards, some_fail,
    memory_underestimated, noise_of_one_percent, noise_of_three_percent, rough, own_remainders, all_at_once, no_model,
)  # fmt: skip


def cases(scenario: Scenario) -> Iterator[Case]:
    """A scenario on every space of ``FIELD``."""
    for name, entry in FIELD.items():
        plan = plan_from(name, entry)
        world = World(plan, random.Random(f"{scenario.__name__} {name}"))
        scenario(world)
        case = case_of(plan, table_of(world, f"{scenario.__name__}, {name}"))
        if world.flat:
            case = replace(case, items={c: replace(i, predicted=1.0) for c, i in case.items.items()})
        yield case


def table_of(world: World, name: str) -> MeasuredTable:
    """Every candidate of the plan, measured once; the job as it was always runs."""
    plan = world.plan
    assert plan.baseline is not None
    rows = [
        row(world, item, item.candidate.config_id == plan.baseline.candidate.config_id)
        for item in world.ranked
    ]
    header = TableHeader(
        kind="table",
        space=name,
        gpu=plan.space.cluster.gpu.name,
        gpus=plan.space.cluster.world_size,
        date="made up",
        torch="none",
        baseline=plan.baseline.candidate.config_id,
        run_noise=world.run_noise,
    )
    return MeasuredTable(name, header, tuple(rows))


def row(world: World, item: Ranked, runs_surely: bool) -> TableRow:
    """One probe: its steps, and seconds as probes on H200 took by compile mode and float8."""
    space, choices, rng = world.plan.space, item.candidate.choices, world.rng
    mode = choices.get("compile", "off")
    layers = (space.base.model.n_layers / 16) ** 0.5
    start = 20.0 + layers * START_SECONDS[mode] * world.slow_start.get(mode, 1.0) * rng.uniform(0.8, 1.2)
    start += 10.0 * (choices.get("float8", "off") != "off")
    found: dict[str, object] = {"config_id": item.candidate.config_id, "choices": dict(choices)}
    if world.failing(item) and not runs_surely:
        return TableRow.model_validate({**found, "status": ProbeStatus.OOM, "seconds": start + 3.0})
    speed = world.speed(item)
    tokens = space.global_batch_size * int(space.base.get("training.seq_len")) / space.cluster.world_size
    steps = sorted(speed * math.exp(rng.gauss(0.0, STEP_NOISE)) for _ in range(7))
    middle = {"tokens_per_second_per_gpu": steps[3], "interval": (steps[1], steps[5])}
    seconds = start + 10 * tokens / speed + 5.0
    return TableRow.model_validate(
        {
            **found,
            **middle,
            "status": ProbeStatus.COMPLETED,
            "step_tokens_per_second": steps,
            "seconds": seconds,
        }
    )
