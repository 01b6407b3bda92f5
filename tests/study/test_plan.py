"""A plan over the grid is the plan made combination by combination."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain_plan import plain_plan

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import Verdict
from titan_tune.errors import InputError, NothingFeasibleError
from titan_tune.estimate import NotCoveredError, estimate_memory, estimate_step_time
from titan_tune.space.axes import Space
from titan_tune.space.enumerate import candidates
from titan_tune.space.named_axes import AxisContext, build_axis
from titan_tune.study import plan as module
from titan_tune.study.plan import fastest, make_plan
from titan_tune.titan.job import Job, job_from_text
from titan_tune.titan.settings import resolve


def job(text: str = "", *, model: str = "llama3", flavor: str = "8B") -> Job:
    return job_from_text(f'[model]\nname = "{model}"\nflavor = "{flavor}"\n{text}', name="job.toml")


BASES = [
    job("[training]\nlocal_batch_size = 2\nseq_len = 4096\n"),
    job(
        "[training]\nlocal_batch_size = 4\n[parallelism]\npipeline_parallel_degree = 2\n[compile]\nenable = true\n"
    ),
    job(
        "[training]\nlocal_batch_size = 1\nglobal_batch_size = 8\n[parallelism]\ntensor_parallel_degree = 2\n"
    ),
    job(
        "[training]\nlocal_batch_size = 2\n"
        "[activation_checkpoint]\nmode = 'full'\n[optimizer]\nearly_step_in_backward = true\n",
        flavor="debugmodel",
    ),
    job(model="deepseek_v3", flavor="debugmodel"),
    job(model="gpt_oss", flavor="debugmodel"),
]
AXES: dict[str, Any] = {
    "parallelism": [
        "auto",
        [{"tp": 2}, {}, {"cp": 2}, {"dp_replicate": 2}],
        [{"pp": 2}, {"pp": 2, "schedule": "ZBVZeroBubble"}, {"pp": 2, "schedule": "Interleaved1F1B"}],
        [{"ep": 2}, {"ep": 2, "tp": 2, "etp": 2}, {"tp": 4, "dp_shard": 1}],
    ],
    "activation_checkpoint": [["none", "full", "selective-1"], ["selective-op", "memory_budget-0.4", "full"]],
    "compile": [["off", "default", "max-autotune"], ["reduce-overhead", "default"]],
    "float8": [
        ["off", "tensorwise", "tensorwise-fsdp_all_gather"],
        ["rowwise", "off", "rowwise_with_gw_hp"],
    ],
    "local_batch_size": ["auto", [1, 2, 3], [4, 8]],
    "compile.components": [[["loss"], ["model", "loss"]], [["model"], []]],
    "parallelism.fsdp_reshard_after_forward": [["default", "always", "never"]],
    "parallelism.enable_async_tensor_parallel": [[False, True]],
    "parallelism.disable_loss_parallel": [[True, False]],
    "parallelism.pipeline_parallel_schedule": [["1F1B", "GPipe"]],
    "training.mixed_precision_param": [["bfloat16", "float32"]],
    "training.dtype": [["float32", "bfloat16"]],
    "training.enable_cpu_offload": [[False, True]],
    "training.seq_len": [[2048, 2050, 131072]],
    "optimizer.lr": [[1e-4, 3e-4]],
    "optimizer.early_step_in_backward": [[True, False]],
}


@st.composite
def spaces(draw: st.DrawFn, *, most: int = 3000) -> Space:
    base = draw(st.sampled_from(BASES))
    gpu = draw(st.sampled_from(["h100-80gb", "a100-40gb", "mi300x"]))
    cluster = ClusterSpec(gpu=gpu_spec(gpu), gpus_per_node=draw(st.sampled_from([1, 2, 4])))
    context = AxisContext(base, cluster, resolve(base, cluster).global_batch_size, "test")
    names = draw(st.lists(st.sampled_from(sorted(AXES)), unique=True, min_size=2, max_size=6))
    axes = tuple(build_axis(name, draw(st.sampled_from(AXES[name])), context) for name in names)
    assume(np.prod([len(axis.values) for axis in axes]) <= most)
    return Space(base, cluster, axes, context.global_batch_size)


@settings(max_examples=120, deadline=None)
@given(spaces())
def test_a_plan_is_the_plain_one(space: Space) -> None:
    try:
        expected = plain_plan(space)
    except InputError:  # an estimate refuses what no rule does: so must the plan
        with pytest.raises(InputError):
            make_plan(space)
        return
    found = candidates(space)
    assert list(found.feasible) == expected.feasible
    assert [found.feasible.config_id(i) for i in range(len(found.feasible))] == [
        candidate.config_id for candidate in expected.feasible
    ]
    assert (found.total, found.duplicates) == (expected.total, expected.duplicates)
    try:
        plan = make_plan(space)
    except NothingFeasibleError:
        assert not expected.pool
        return
    assert [(ranked.candidate, ranked.outlook) for ranked in plan.pool] == expected.pool
    assert list(plan.rejected.items()) == list(expected.rejected.items())
    assert list(plan.examples.items()) == list(expected.examples.items())


def small_space(**axes: Any) -> Space:
    base, cluster = BASES[0], ClusterSpec(gpu=gpu_spec("h100-80gb"), gpus_per_node=8)
    context = AxisContext(base, cluster, 16, "test")
    chosen = {"parallelism": "auto", "activation_checkpoint": ["none", "full"], **axes}
    return Space(base, cluster, tuple(build_axis(n, raw, context) for n, raw in chosen.items()), 16)


def test_estimates_in_full_are_those_of_the_outlook() -> None:
    for ranked in make_plan(small_space()).pool:
        settings_of = ranked.candidate.settings
        assert ranked.memory == estimate_memory(settings_of) and ranked.memory.verdict is ranked.verdict
        assert ranked.step_time == estimate_step_time(settings_of)
        assert ranked.predicted_tokens_per_second == ranked.step_time.tokens_per_second_per_gpu
        assert ranked.verdict is not Verdict.DOES_NOT_FIT


def test_a_large_pool_keeps_the_fastest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    space = small_space(compile=["off", "default", "max-autotune"])
    whole = make_plan(space)
    assert not whole.notes
    monkeypatch.setattr(module, "MAX_POOL", 7)
    cut = make_plan(space)
    assert [r.candidate for r in cut.pool] == [r.candidate for r in whole.pool[:7]]
    assert cut.rejected == whole.rejected
    (note,) = cut.notes
    assert f"{len(whole.pool)} candidates fit" in note and "the 7 predicted fastest" in note


@given(
    speeds=st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=40),
    limit=st.integers(1, 45),
    offset=st.integers(0, 3),
)
def test_fastest_is_the_head_of_the_whole_order(speeds: list[float], limit: int, offset: int) -> None:
    class Ids:
        def config_id(self, place: int) -> str:
            return f"{place * 7919 % 101:03d}"

    places = np.arange(offset, offset + len(speeds))
    order = sorted(places.tolist(), key=lambda p: (-speeds[p - offset], Ids().config_id(p)))
    assert fastest(Ids(), places, np.array(speeds), limit) == order[:limit]


def test_what_no_formula_covers_is_ordered_by_config_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise NotCoveredError("not covered")

    monkeypatch.setattr(module, "estimate_step_time", refuse)
    plan = make_plan(small_space())
    assert [r.candidate.config_id for r in plan.pool] == sorted(r.candidate.config_id for r in plan.pool)
    assert {(r.predicted_tokens_per_second, r.verdict, r.memory, r.step_time) for r in plan.pool} == {
        (1.0, None, None, None)
    }
    assert plan.notes == ("no formula covers llama3 8B: nothing is pruned by memory",)
    assert module.MEMORY_RULE not in plan.rejected
