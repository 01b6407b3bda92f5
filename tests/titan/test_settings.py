from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.catalog.loader import gpu_spec, model_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import AcMode, CompileMode, Float8, ParallelDims, Pipeline, Settings
from titan_tune.titan.job import job_from_text
from titan_tune.titan.keys import Key, defaults, keys
from titan_tune.titan.settings import FIELD_KEYS, resolve, settings_from

MODEL = model_spec("llama3", "8B")


def cluster(world_size: int) -> ClusterSpec:
    return ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=world_size)


def build(world_size: int = 8, **values: object) -> Settings:
    dotted = {key.replace("__", "."): value for key, value in values.items()}
    assert set(dotted) <= set(defaults())
    return settings_from({**defaults(), **dotted}, MODEL, cluster(world_size))


def test_defaults_are_torchtitans() -> None:
    found = build(8)
    assert found == Settings(
        model=MODEL,
        cluster=cluster(8),
        dims=ParallelDims(dp_shard=8),
        local_batch_size=8,
        global_batch_size=64,
        seq_len=2048,
    )


def test_every_part() -> None:
    found = build(
        64,
        parallelism__data_parallel_replicate_degree=2,
        parallelism__tensor_parallel_degree=4,
        parallelism__pipeline_parallel_degree=2,
        parallelism__expert_parallel_degree=4,
        parallelism__pipeline_parallel_schedule="Interleaved1F1B",
        parallelism__pipeline_parallel_microbatch_size=2,
        parallelism__pipeline_parallel_layers_per_stage=4,
        parallelism__pipeline_parallel_first_stage_less_layers=0,
        parallelism__pipeline_parallel_last_stage_less_layers=2,
        parallelism__pipeline_parallel_expert_parallel_overlap=False,
        parallelism__module_fqns_per_model_part=[["tok_embeddings"]],
        parallelism__enable_async_tensor_parallel=True,
        parallelism__disable_loss_parallel=True,
        parallelism__fsdp_reshard_after_forward="never",
        parallelism__context_parallel_load_balancer="ptrr",
        parallelism__expert_parallel_comm_backend="deepep",
        training__local_batch_size=4,
        training__global_batch_size=128,
        training__seq_len=4096,
        training__dtype="bfloat16",
        training__mixed_precision_param="float32",
        training__enable_cpu_offload=True,
        activation_checkpoint__mode="memory_budget",
        activation_checkpoint__memory_budget=0.25,
        compile__enable=True,
        compile__components=["loss"],
        titan_tune__compile_mode="max-autotune",
        model__converters=["quantize.linear.float8", "quantize.grouped_mm.float8"],
        quantize__linear__float8__recipe_name="rowwise",
        quantize__linear__float8__filter_fqns=["output"],
        quantize__linear__float8__emulate=True,
        optimizer__name="Adam",
        optimizer__implementation="foreach",
        optimizer__early_step_in_backward=True,
    )
    assert found.dims == ParallelDims(dp_replicate=2, dp_shard=4, tp=4, pp=2, ep=4)
    assert (found.local_batch_size, found.global_batch_size, found.seq_len) == (4, 128, 4096)
    assert found.gradient_accumulation_steps == 4
    assert (found.dtype, found.mixed_precision_param, found.cpu_offload) == ("bfloat16", "float32", True)
    assert (found.ac.mode, found.ac.memory_budget) == (AcMode.MEMORY_BUDGET, 0.25)
    assert (found.compile.model, found.compile.loss) == (False, True)
    assert found.compile.mode is CompileMode.MAX_AUTOTUNE
    assert found.float8 == Float8("rowwise", True, emulate=True, filter_fqns=("output",))
    assert (found.grouped_float8, found.mxfp8, found.grouped_mxfp8) == (True, False, False)
    assert found.pipeline == Pipeline("Interleaved1F1B", 2, 4, 0, 2, False, True)
    assert (found.async_tp, found.loss_parallel, found.reshard_after_forward) == (True, False, "never")
    assert (found.optimizer, found.optimizer_implementation) == ("Adam", "foreach")
    assert found.early_step_in_backward
    assert (found.cp_load_balancer, found.ep_comm_backend) == ("ptrr", "deepep")


@pytest.mark.parametrize(("option", "every"), [("op", 0), ("0", 1), ("1", 1), ("2", 2), ("12", 12)])
def test_selective_option(option: str, every: int) -> None:
    assert build(activation_checkpoint__selective_ac_option=option).ac.every == every


def test_compile_off_compiles_nothing() -> None:
    found = build(compile__components=["model", "loss"]).compile
    assert not found.model
    assert not found.loss


def test_converters_decide_the_quantization() -> None:
    assert build(quantize__linear__float8__recipe_name="rowwise").float8 is None
    unnamed = build(
        model__converters=["quantize.linear.float8"],
        quantize__linear__float8__enable_fsdp_float8_all_gather=True,
        quantize__linear__float8__precompute_float8_dynamic_scale_for_fsdp=True,
    ).float8
    assert unnamed == Float8("tensorwise", False, fsdp_all_gather=True, precompute_scale=True)
    mx = build(model__converters=["quantize.linear.mx", "quantize.grouped_mm.mx"])
    assert (mx.mxfp8, mx.grouped_mxfp8, mx.float8, mx.grouped_float8) == (True, True, None, False)


def test_a_schedule_file_is_an_explicit_split() -> None:
    assert build(parallelism__pipeline_parallel_schedule_csv="a.csv").pipeline.explicit_split
    assert not build().pipeline.explicit_split


DEGREE = st.integers(1, 9)


@settings(deadline=None)
@given(
    world_size=st.integers(1, 512), replicate=DEGREE, tp=DEGREE, pp=DEGREE, cp=DEGREE, local=st.integers(1, 9)
)
def test_leftover_ranks_and_batch(
    world_size: int, replicate: int, tp: int, pp: int, cp: int, local: int
) -> None:
    found = build(
        world_size,
        parallelism__data_parallel_replicate_degree=replicate,
        parallelism__tensor_parallel_degree=tp,
        parallelism__pipeline_parallel_degree=pp,
        parallelism__context_parallel_degree=cp,
        training__local_batch_size=local,
    )
    rest = replicate * tp * pp * cp
    assert found.dims.dp_shard == max(1, world_size // rest)
    assert found.global_batch_size == local * found.dims.dp_degree
    assert found.gradient_accumulation_steps == 1


@pytest.mark.torchtitan
@settings(deadline=None)
@given(world_size=st.integers(1, 64), replicate=DEGREE, tp=DEGREE, pp=DEGREE, cp=DEGREE, ep=DEGREE)
def test_dims_are_those_of_the_real_class(
    world_size: int, replicate: int, tp: int, pp: int, cp: int, ep: int
) -> None:
    from torchtitan.distributed.parallel_dims import ParallelDims as RealDims

    found = build(
        world_size,
        parallelism__data_parallel_replicate_degree=replicate,
        parallelism__tensor_parallel_degree=tp,
        parallelism__pipeline_parallel_degree=pp,
        parallelism__context_parallel_degree=cp,
        parallelism__expert_parallel_degree=ep,
    ).dims
    try:
        real = RealDims(replicate, -1, cp, tp, pp, ep, 1, world_size)
    except AssertionError:
        assert found.world_size != world_size
    else:
        assert real.dp_shard == found.dp_shard
        assert found.world_size == world_size


def test_resolve_a_job() -> None:
    job = job_from_text('[model]\nflavor = "8B"\n[training]\nseq_len = 8192\n', name="job")
    found = resolve(job, cluster(2))
    assert (found.model, found.seq_len, found.dims.dp_shard) == (MODEL, 8192, 2)


BASES_OF_FIELDS: list[dict[str, object]] = [
    {"parallelism.data_parallel_shard_degree": 2, "training.global_batch_size": 64},
    {
        "parallelism.tensor_parallel_degree": 2,
        "compile.enable": True,
        "titan_tune.compile_mode": "max-autotune",
    },
    {"model.converters": ["quantize.linear.float8"], "activation_checkpoint.mode": "memory_budget"},
]


def other_values(key: Key, value: object) -> list[object]:
    """Some values of a key that are not ``value``."""
    if key.name == "model.converters":
        names = ("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8")
        found: list[object] = [[], *([name] for name in (*names, "quantize.grouped_mm.mx"))]
    elif key.name == "activation_checkpoint.selective_ac_option":
        found = ["1", "op"]
    else:
        texts = list(key.choices) or ["x"]
        by_type = {"bool": [False, True], "int": [1, 4], "float": [0.25, 0.75], "str": texts}
        found = by_type.get(key.type, [[], [key.choices[0] if key.choices else "x"]])
    return [other for other in found if other != value]


def flat_fields(found: Settings) -> dict[str, object]:
    """Fields by the names of FIELD_KEYS, nested ones apart."""
    flat: dict[str, object] = {}
    for field, names in FIELD_KEYS.items():
        value = getattr(found, field)
        nested = (
            {f"{field}.{name}": getattr(value, name) for name in names} if isinstance(names, dict) else None
        )
        flat |= nested or {field: value}
    return flat


def test_field_keys_name_every_field() -> None:
    assert set(FIELD_KEYS) == {field.name for field in fields(Settings)}
    for name, names in FIELD_KEYS.items():
        if isinstance(names, dict):
            assert set(names) == {field.name for field in fields(getattr(build(), name))}


@pytest.mark.parametrize("base", BASES_OF_FIELDS, ids=lambda base: next(iter(base)))
def test_fields_depend_on_no_other_keys(base: dict[str, object]) -> None:
    values = {**defaults(), **base}
    before = flat_fields(settings_from(values, MODEL, cluster(8)))
    keys_of = {
        name: set(names)
        for field, entry in FIELD_KEYS.items()
        for name, names in (
            {f"{field}.{part}": part_names for part, part_names in entry.items()}
            if isinstance(entry, dict)
            else {field: entry}
        ).items()
    }
    decisive = set()
    for name, key in keys().items():
        for other in other_values(key, values[name]):
            after = flat_fields(settings_from({**values, name: other}, MODEL, cluster(8)))
            changed = {field for field in after if after[field] != before[field]}
            assert all(name in keys_of[field] for field in changed), (name, changed)
            decisive |= {name} if changed else set()
    assert len(decisive) > 20
