"""From spaces to candidates: every combination is accounted for, every run once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.candidate import Candidate
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.machine import cpu_spec
from titan_tune.space.axes import Axis, AxisValue, Space
from titan_tune.space.default import DEFAULT_AXES, space_from_job
from titan_tune.space.enumerate import baseline, candidates
from titan_tune.space.file import load_space
from titan_tune.space.named_axes import AxisContext, build_axis
from titan_tune.titan import rules
from titan_tune.titan.canonical import identity
from titan_tune.titan.job import Job, job_from_text
from titan_tune.titan.settings import resolve, settings_from

SPACES = Path(__file__).parents[2] / "search_spaces"
H100 = gpu_spec("h100-80gb")
MACHINE = ClusterSpec(gpu=cpu_spec(2), gpus_per_node=2)
"""Where a space names no cluster."""


def job(text: str = "", *, model: str = "llama3", flavor: str = "8B") -> Job:
    return job_from_text(f'[model]\nname = "{model}"\nflavor = "{flavor}"\n{text}', name="job.toml")


def space(
    axes: Mapping[str, Any], *, base: Job | None = None, gpus: int = 8, global_batch: int | None = None
) -> Space:
    base = base or job("[training]\nlocal_batch_size = 2\n")
    cluster = ClusterSpec(gpu=H100, gpus_per_node=gpus)
    global_batch = global_batch or resolve(base, cluster).global_batch_size
    context = AxisContext(base, cluster, global_batch, "test")
    return Space(base, cluster, tuple(build_axis(n, raw, context) for n, raw in axes.items()), global_batch)


def identity_when_run(candidate: Candidate, of: Space) -> str:
    """Identity of the job file that the candidate is rendered to."""
    run = of.base.with_values(candidate.values)
    return identity(run.resolved(), resolve(run, of.cluster), run.model)


@pytest.mark.parametrize("path", sorted(SPACES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_spaces(path: Path) -> None:
    loaded = load_space(path, machine=MACHINE)
    found = candidates(loaded)
    assert found.feasible
    assert found.total == len(found.feasible) + found.duplicates + sum(found.rejected.values())
    assert found.rejected and set(found.rejected) == set(found.examples)
    assert set(found.rejected) <= {rule.id for rule in rules.INVALID_RULES}
    assert (
        rules.first_invalid(found.baseline.settings, loaded.base.resolved() | dict(found.baseline.values))
        is None
    )
    # the job as it is is one of the points of each shipped space
    assert "base" not in found.baseline.choices.values()
    assert found.baseline.identity in {candidate.identity for candidate in found.feasible}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo", {"cpu-context-parallel", "cpu-compile-tensor-parallel"}),
        ("llama3_1b_h200", {"memory-budget-compile"}),
        ("llama3_1b_2gpu", {"batch-divides", "pp-microbatches", "memory-budget-compile"}),
        ("llama3_8b", {"batch-divides", "pp-microbatches", "memory-budget-compile", "ddp-more-dimensions"}),
        ("llama3_70b", {"batch-divides", "pp-microbatches", "zero-bubble-compile", "zero-bubble-op-ac"}),
    ],
)
def test_shipped_spaces_reject_by_reason(name: str, expected: set[str]) -> None:
    assert set(candidates(load_space(SPACES / f"{name}.toml", machine=MACHINE)).rejected) == expected


axes = st.fixed_dictionaries(
    {"parallelism": st.sampled_from(["auto", [{"tp": 2}, {"pp": 2, "schedule": "ZBVZeroBubble"}]])},
    optional={
        "activation_checkpoint": st.sampled_from(
            [["none", "full", "selective-1"], ["selective-op", "memory_budget-1"]]
        ),
        "compile": st.sampled_from([["off"], ["off", "default", "reduce-overhead"]]),
        "float8": st.sampled_from([["off", "rowwise"], ["tensorwise", "tensorwise-fsdp_all_gather"]]),
        "local_batch_size": st.sampled_from(["auto", [1, 3]]),
        "parallelism.enable_async_tensor_parallel": st.just([False, True]),
        "parallelism.fsdp_reshard_after_forward": st.just(["default", "always", "never"]),
        "training.seq_len": st.just([2048, 2052]),
    },
)
bases = st.sampled_from(
    [
        job("[training]\nlocal_batch_size = 2\n"),
        job(
            "[compile]\nenable = true\n[activation_checkpoint]\nmode = 'full'\n"
            "[parallelism]\ntensor_parallel_degree = 2\n"
        ),
        job(
            "[training]\nglobal_batch_size = 12\nlocal_batch_size = 3\n[parallelism]\npipeline_parallel_degree = 2\n"
        ),
        job(model="deepseek_v3", flavor="debugmodel"),
    ]
)


@settings(max_examples=60, deadline=None)
@given(axes, bases, st.sampled_from([1, 2, 4]))
def test_every_combination_is_accounted_for(chosen: dict[str, Any], base: Job, gpus: int) -> None:
    of = space(chosen, base=base, gpus=gpus)
    found = candidates(of)
    expected = 1
    for axis in of.axes:
        expected *= len(axis.values)
    assert found.total == expected
    assert found.total == len(found.feasible) + found.duplicates + sum(found.rejected.values())
    identities = [candidate.identity for candidate in found.feasible]
    assert len(set(identities)) == len(identities)
    for candidate in found.feasible:
        values = base.with_values(candidate.values).resolved()
        assert rules.first_invalid(candidate.settings, values) is None
        assert identity_when_run(candidate, of) == candidate.identity
        assert candidate.settings.global_batch_size == of.global_batch_size
        assert list(candidate.choices) == [axis.name for axis in of.axes]


@settings(max_examples=30, deadline=None)
@given(axes, bases)
def test_rejections_are_those_of_the_plain_rules(chosen: dict[str, Any], base: Job) -> None:
    """Deciding layouts once gives what checking each combination by itself gives."""
    from collections import Counter
    from itertools import product

    of = space(chosen, base=base, gpus=2)
    expected: Counter[str] = Counter()
    for combination in product(*(axis.values for axis in of.axes)):
        patch = {"training.global_batch_size": of.global_batch_size}
        for choice in combination:
            patch |= choice.values
        values = base.with_values(patch).resolved()
        finding = rules.first_invalid(settings_from(values, base.model, of.cluster), values)
        if finding is not None:
            expected[finding.rule] += 1
    assert candidates(of).rejected == expected


def test_candidates_come_in_file_order() -> None:
    found = candidates(space({"compile": ["off", "default"], "local_batch_size": [1, 2]}))
    assert [tuple(c.choices.values()) for c in found.feasible] == [
        ("off", "1"),
        ("off", "2"),
        ("default", "1"),
        ("default", "2"),
    ]


def test_candidates_write_only_what_differs_from_the_base() -> None:
    base = job("[training]\nlocal_batch_size = 2\nglobal_batch_size = 16\n[compile]\nenable = true\n")
    found = candidates(space({"compile": ["off", "default"], "local_batch_size": [1, 2]}, base=base))
    assert [dict(c.values) for c in found.feasible] == [
        {"compile.enable": False, "training.local_batch_size": 1},
        {"compile.enable": False},
        {"training.local_batch_size": 1},
        {},
    ]


def test_the_global_batch_is_held() -> None:
    found = candidates(space({"local_batch_size": [1, 2, 4]}))
    assert [c.values["training.global_batch_size"] for c in found.feasible] == [16, 16]
    assert [c.settings.gradient_accumulation_steps for c in found.feasible] == [2, 1]
    assert found.rejected == {"batch-divides": 1}
    assert "local_batch_size=4" in found.examples["batch-divides"].message


def test_duplicates_are_counted_once() -> None:
    found = candidates(space({"activation_checkpoint": ["full", "selective-1", "none", "selective-99"]}))
    assert [c.choices["activation_checkpoint"] for c in found.feasible] == ["full", "none"]
    assert found.duplicates == 2


def test_baseline_has_the_labels_of_what_it_does() -> None:
    base = job("[activation_checkpoint]\nmode = 'full'\n[training]\nlocal_batch_size = 3\n")
    own = baseline(
        space(
            {
                "activation_checkpoint": ["none", "full"],
                "parallelism": "auto",
                "local_batch_size": [1, 2],
                "compile": ["off", "default"],
            },
            base=base,
        )
    )
    assert own.choices == {
        "activation_checkpoint": "full",
        "parallelism": "dp_shard=8",
        "local_batch_size": "base",
        "compile": "off",
    }


def test_baseline_shares_its_identity_with_the_point_it_is() -> None:
    of = space({"compile": ["off", "default"], "parallelism": "auto"})
    found = candidates(of)
    same = [c for c in found.feasible if c.identity == found.baseline.identity]
    assert [dict(c.choices) for c in same] == [found.baseline.choices]
    assert same[0].config_id == found.baseline.config_id
    assert identity_when_run(found.baseline, of) == found.baseline.identity


def test_unset_values_fall_back_to_torchtitans_default() -> None:
    base = job("[quantize.linear.float8]\nrecipe_name = 'rowwise'\n[model]\n".replace("[model]\n", ""))
    of = space({"float8": ["tensorwise", "rowwise"]}, base=base)
    first, second = candidates(of).feasible
    assert first.values["quantize.linear.float8.recipe_name"] is None
    assert "quantize.linear.float8.recipe_name" not in second.values
    assert first.settings.float8 is not None and first.settings.float8.recipe == "tensorwise"


def test_default_space_of_a_job() -> None:
    cluster = ClusterSpec(gpu=H100, gpus_per_node=8)
    of = space_from_job(job(), cluster)
    assert [axis.name for axis in of.axes] == list(DEFAULT_AXES)
    assert of.numerics_axes == ()
    assert of.global_batch_size == 64
    found = candidates(of)
    assert found.feasible and "base" not in found.baseline.choices.values()


def test_default_space_of_one_gpu_has_no_layouts() -> None:
    of = space_from_job(job(), ClusterSpec(gpu=H100), axes={"float8": ["off", "rowwise"]})
    assert [axis.name for axis in of.axes] == [
        "activation_checkpoint",
        "compile",
        "local_batch_size",
        "float8",
    ]
    assert of.numerics_axes == ("float8",)


def test_default_space_includes_the_jobs_own_values() -> None:
    base = job(
        "[activation_checkpoint]\nselective_ac_option = '3'\n[training]\nlocal_batch_size = 3\n"
        "[compile]\nenable = true\n[titan_tune]\ncompile_mode = 'max-autotune'\n"
    )
    of = space_from_job(base, ClusterSpec(gpu=H100, gpus_per_node=2))
    first = {axis.name: axis.labels[0] for axis in of.axes}
    assert first["activation_checkpoint"] == first["local_batch_size"] == first["compile"] == "base"
    found = candidates(of)
    assert found.baseline.identity in {c.identity for c in found.feasible}


def test_axis_keys_are_those_of_all_its_values() -> None:
    axis = Axis("a", (AxisValue("x", {"compile.enable": True}), AxisValue("y", {"training.seq_len": 8})))
    assert axis.keys == {"compile.enable", "training.seq_len"}
