"""Equal runs have one identity, and different ones do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from configurations import CPU, FLOAT8, configuration
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from titan_tune.domain.settings import AcMode
from titan_tune.titan import rules
from titan_tune.titan.canonical import (
    canonical,
    identity,
    identity_keys,
    identity_tables,
    is_bookkeeping,
    join_identity,
    model_shape,
    table_identity,
)
from titan_tune.titan.keys import check_value, defaults, keys
from titan_tune.titan.noops import NORMALISERS
from titan_tune.titan.settings import settings_from


def identity_of(short: dict[str, Any]) -> str:
    config, values = configuration(**short)
    return identity(values, config, config.model)


SAME: dict[str, tuple[dict, dict]] = {
    "dp_shard of -1": ({"shard": -1, "tp": 2}, {"shard": 4, "tp": 2}),
    "global batch of -1": ({"local": 2}, {"local": 2, "global_": 16}),
    "async tp at tp=1": ({"compile": True, "async_tp": True}, {"compile": True}),
    "loss parallel at tp=1": ({"no_loss_parallel": True}, {}),
    "ep on a dense model": ({"ep": 4}, {}),
    "etp at ep=1": ({"model": "qwen3/30B-A3B", "tp": 2, "etp": 2}, {"model": "qwen3/30B-A3B", "tp": 2}),
    "deepep on a dense model": ({"ep_backend": "deepep"}, {}),
    "pipeline keys at pp=1": ({"schedule": "GPipe", "microbatch": 4, "layers_per_stage": 3}, {}),
    "case of a schedule": (
        {"pp": 2, "schedule": "interleaved1F1b"},
        {"pp": 2, "schedule": "Interleaved1F1B"},
    ),
    "default layers per stage": ({"pp": 2, "layers_per_stage": 17}, {"pp": 2}),
    "ep overlap without DualPipeV": ({"pp": 2, "overlap": False}, {"pp": 2}),
    "load balancer at cp=1": ({"balancer": None}, {}),
    "rotate method": ({"cp": 2, "rotate": "alltoall"}, {"cp": 2}),
    "reshard without FSDP": ({"replicate": 8, "reshard": "always"}, {"replicate": 8}),
    "no resharding under pp": ({"pp": 2, "reshard": "never"}, {"pp": 2}),
    "mixed precision without FSDP under tp": ({"tp": 8, "mixed": "float32"}, {"tp": 8}),
    "selective 1 and full": ({"option": "1"}, {"ac": "full"}),
    "selective 0 and full": ({"option": "0"}, {"ac": "full"}),
    "selective beyond the layers and none": ({"option": "33"}, {"ac": "none"}),
    "selective 02": ({"option": "02"}, {"option": "2"}),
    "selective option under full": ({"ac": "full", "option": "op"}, {"ac": "full"}),
    "budget outside memory_budget": ({"budget": 0.3}, {}),
    "budget of 1": ({"ac": "memory_budget", "budget": 1.0, "compile": True}, {"ac": "none", "compile": True}),
    "components with compile off": ({"components": ["loss"], "compile_mode": "max-autotune"}, {}),
    "compile without components": ({"compile": True, "components": []}, {}),
    "order of components": (
        {"compile": True, "components": ["loss", "model"]},
        {"compile": True, "components": ["model", "loss"]},
    ),
    "cuda graphs on CPU": (
        {"gpu": CPU, "gpus": 2, "compile": True, "compile_mode": "reduce-overhead"},
        {"gpu": CPU, "gpus": 2, "compile": True},
    ),
    "float8 options without float8": ({"recipe": "rowwise", "filters": ["output"], "all_gather": True}, {}),
    "tensorwise by name": ({"converters": FLOAT8, "recipe": "tensorwise"}, {"converters": FLOAT8}),
    "float8 all-gather unsharded": (
        {"gpus": 1, "converters": FLOAT8, "all_gather": True, "precompute": True},
        {"gpus": 1, "converters": FLOAT8},
    ),
    "precompute without all-gather": ({"converters": FLOAT8, "precompute": True}, {"converters": FLOAT8}),
    "order of filters": (
        {"converters": FLOAT8, "filters": ["wq", "output", "wq"]},
        {"converters": FLOAT8, "filters": ["output", "wq"]},
    ),
    "model compile of gpt_oss": (
        {"model": "gpt_oss/20b", "compile": True},
        {"model": "gpt_oss/20b", "compile": True, "components": ["loss"]},
    ),
    "bookkeeping": (
        {"values": {"job.description": "x", "metrics.log_freq": 1, "checkpoint.enable": True}},
        {},
    ),
    "the plug-in": (
        {
            "values": {
                "experimental.custom_import": "titan_tune.titan.plugin",
                "titan_tune.custom_import": "mine",
            }
        },
        {"values": {"experimental.custom_import": "mine"}},
    ),
    "fault tolerance switched off": ({"values": {"fault_tolerance.group_size": 4}}, {}),
    "schedule length by default": ({"steps": 500}, {"steps": 900, "total_steps": 500}),
    "layers per stage of an explicit split": (
        {"pp": 2, "split": [["tok_embeddings"], ["output"]], "first_less": 0},
        {"pp": 2, "split": [["tok_embeddings"], ["output"]]},
    ),
}

DIFFERENT: dict[str, tuple[dict, dict]] = {
    "world size": ({"gpus": 8}, {"gpus": 4, "global_": 64}),
    "model": ({"model": "llama3/8B"}, {"model": "llama3/70B"}),
    "model arguments": (
        {"model_update": {"model_args": {"rope_theta": 1e4}}},
        {"model_update": {"model_args": {"rope_theta": 5e5}}},
    ),
    "replicate or shard": ({"replicate": 8}, {"replicate": 2}),
    "always reshards norm and output too": ({"reshard": "always"}, {}),
    "always reshards under pp": ({"pp": 2, "reshard": "always"}, {"pp": 2}),
    "selective op": ({"option": "op"}, {"option": "2"}),
    "last layer checkpointed": ({"option": "32"}, {"ac": "none"}),
    "budget": (
        {"ac": "memory_budget", "budget": 0.3, "compile": True},
        {"ac": "memory_budget", "compile": True},
    ),
    "compiled component": ({"compile": True}, {"compile": True, "components": ["model"]}),
    "compile mode": ({"compile": True, "compile_mode": "max-autotune"}, {"compile": True}),
    "cuda graphs": ({"compile": True, "compile_mode": "reduce-overhead"}, {"compile": True}),
    "float8": ({"converters": FLOAT8}, {}),
    "float8 recipe": ({"converters": FLOAT8, "recipe": "rowwise"}, {"converters": FLOAT8}),
    "float8 all-gather": ({"converters": FLOAT8, "all_gather": True}, {"converters": FLOAT8}),
    "float8 emulated": ({"converters": FLOAT8, "emulate": True}, {"converters": FLOAT8}),
    "async tp refused and not asked for": ({"tp": 2, "async_tp": True}, {"tp": 2}),
    "ep on a mesh that does not exist": ({"ep": 3}, {}),
    "early steps refuse ep": ({"ep": 4, "early_step": True}, {"early_step": True}),
    "loss parallel": ({"tp": 2, "no_loss_parallel": True}, {"tp": 2}),
    "mixed precision of FSDP": ({"mixed": "float32"}, {}),
    "layers per stage": (
        {"pp": 2, "schedule": "Interleaved1F1B", "layers_per_stage": 6},
        {"pp": 2, "schedule": "Interleaved1F1B"},
    ),
    "overlap of DualPipeV": (
        {"pp": 2, "schedule": "DualPipeV", "overlap": False},
        {"pp": 2, "schedule": "DualPipeV"},
    ),
    "local batch": ({"local": 4, "global_": 64}, {"local": 8, "global_": 64}),
    "learning rate": ({"values": {"optimizer.lr": 1e-3}}, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_same_run(name: str) -> None:
    first, second = SAME[name]
    assert identity_of(first) == identity_of(second)


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_runs(name: str) -> None:
    first, second = DIFFERENT[name]
    assert identity_of(first) != identity_of(second)


def optional(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=strategies)


small = st.sampled_from([1, 2, 4])
shorts = st.builds(
    lambda fixed, free: fixed | free,
    st.fixed_dictionaries(
        {
            "model": st.sampled_from(
                ["llama3/8B", "llama3/debugmodel", "qwen3/30B-A3B", "deepseek_v3/debugmodel", "gpt_oss/20b"]
            ),
            "gpu": st.sampled_from(["h100-80gb", "a100-80gb", "b200", "mi300x", CPU]),
            "gpus": st.sampled_from([1, 2, 8]),
        }
    ),
    optional(
        replicate=small,
        tp=small,
        pp=small,
        cp=small,
        ep=small,
        etp=small,
        schedule=st.sampled_from(["1F1B", "gpipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]),
        microbatch=small,
        layers_per_stage=st.none() | st.integers(1, 20),
        first_less=st.integers(0, 2),
        overlap=st.booleans(),
        async_tp=st.booleans(),
        no_loss_parallel=st.booleans(),
        balancer=st.sampled_from(["headtail", "ptrr", None]),
        reshard=st.sampled_from(["default", "always", "never"]),
        ep_backend=st.sampled_from(["standard", "deepep"]),
        local=st.sampled_from([1, 2, 8]),
        global_=st.sampled_from([-1, 16, 64]),
        seq=st.sampled_from([2048, 2050]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        mixed=st.sampled_from(["float32", "bfloat16"]),
        offload=st.booleans(),
        ac=st.sampled_from([mode.value for mode in AcMode]),
        option=st.sampled_from(["op", "0", "1", "2", "03", "99"]),
        budget=st.sampled_from([0.0, 0.5, 1.0]),
        compile=st.booleans(),
        components=st.lists(st.sampled_from(["model", "loss"]), unique=True),
        compile_mode=st.sampled_from(["default", "max-autotune", "reduce-overhead"]),
        converters=st.lists(
            st.sampled_from([*FLOAT8, "quantize.linear.mx", "quantize.grouped_mm.float8"]), unique=True
        ),
        recipe=st.sampled_from([None, "tensorwise", "rowwise"]),
        all_gather=st.booleans(),
        precompute=st.booleans(),
        emulate=st.booleans(),
        filters=st.lists(st.sampled_from(["output", "wq"])),
        early_step=st.booleans(),
    ),
)


@settings(max_examples=300, deadline=None)
@given(shorts)
def test_canonical_is_idempotent(short: dict[str, Any]) -> None:
    config, values = configuration(**short)
    form = canonical(values, config)
    again = settings_from(form, config.model, config.cluster)
    assert canonical(form, again) == form
    assert identity(form, again, config.model) == identity(values, config, config.model)


@settings(max_examples=300, deadline=None)
@given(shorts)
def test_canonical_is_as_valid_as_the_original(short: dict[str, Any]) -> None:
    config, values = configuration(**short)
    form = canonical(values, config)
    again = settings_from(form, config.model, config.cluster)
    assert bool(rules.invalid(again, form)) is bool(rules.invalid(config, values))


@settings(max_examples=300, deadline=None)
@given(shorts)
def test_canonical_keeps_what_decides_memory_and_speed(short: dict[str, Any]) -> None:
    config, values = configuration(**short)
    assume(not rules.invalid(config, values))
    form = canonical(values, config)
    again = settings_from(form, config.model, config.cluster)
    for name in (
        "model",
        "cluster",
        "local_batch_size",
        "global_batch_size",
        "seq_len",
        "dtype",
        "cpu_offload",
    ):
        assert getattr(again, name) == getattr(config, name)
    kept = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    assert [getattr(again.dims, name) for name in kept] == [getattr(config.dims, name) for name in kept]
    assert again.compile.loss == config.compile.loss
    assert (again.float8 is None) is (config.float8 is None)


@settings(max_examples=300, deadline=None)
@given(shorts)
def test_canonical_values_are_values_of_their_keys(short: dict[str, Any]) -> None:
    config, values = configuration(**short)
    for key, value in canonical(values, config).items():
        assert value is None or check_value(key, value, source="test") == value


def test_identity_leaves_bookkeeping_out() -> None:
    assert is_bookkeeping("job.dump_folder")
    assert not is_bookkeeping("training.seq_len")
    assert set(identity_keys()) == {key for key in keys() if not is_bookkeeping(key)}


def layers_checkpointed(mode: str, option: str, layers: int) -> list[bool]:
    """Which blocks torchtitan's own ``apply_ac`` wraps."""
    import torch
    import torchtitan.distributed.activation_checkpoint as module
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torchtitan.config.job_config import ActivationCheckpoint

    module._layer_sac_count = 0
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({str(i): torch.nn.Identity() for i in range(layers)})
    if mode != "none":
        module.apply_ac(model, ActivationCheckpoint(mode=mode, selective_ac_option=option))
    return [isinstance(block, CheckpointWrapper) for block in model.layers.values()]


@pytest.mark.torchtitan
@pytest.mark.parametrize("option", [str(n) for n in range(9)])
def test_selective_checkpointing_collapses_as_torchtitan_wraps(option: str) -> None:
    config, values = configuration(model="llama3/debugmodel", ac="selective", option=option)
    form = canonical(values, config)
    layers = config.model.n_layers
    mode = form["activation_checkpoint.mode"]
    reduced = layers_checkpointed(mode, form["activation_checkpoint.selective_ac_option"], layers)
    assert layers_checkpointed("selective", option, layers) == reduced
    if mode == "selective":
        assert any(reduced) and not all(reduced)


def float8_converter(config: Any, values: dict[str, Any]) -> Any:
    """torchtitan's own converter for these values."""
    from types import SimpleNamespace

    from torchtitan.components.quantization.float8 import Float8LinearConverter
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.model.converters = list(values["model.converters"])
    job.compile.enable = values["compile.enable"]
    for key, value in values.items():
        if key.startswith("quantize.linear.float8."):
            setattr(job.quantize.linear.float8, key.rpartition(".")[2], value)
    return Float8LinearConverter(job, SimpleNamespace(dp_shard_enabled=config.dims.dp_shard > 1))


@pytest.mark.torchtitan
@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "gpus": st.sampled_from([1, 8]),
            "recipe": st.sampled_from([None, "tensorwise", "rowwise", "rowwise_with_gw_hp"]),
            "all_gather": st.booleans(),
            "precompute": st.booleans(),
            "emulate": st.booleans(),
            "filters": st.lists(st.sampled_from(["output", "wq", "feed_forward"])),
        }
    )
)
def test_float8_collapses_as_torchtitan_configures(short: dict[str, Any]) -> None:
    import torchtitan.components.quantization.float8 as module

    config, values = configuration(converters=FLOAT8, compile=False, **short)
    assume(not rules.invalid(config, values))
    form = canonical(values, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "has_cuda_capability", lambda *_: True)
        original, reduced = float8_converter(config, values), float8_converter(config, form)
    assert original.config == reduced.config
    assert original.precompute_scale == reduced.precompute_scale
    assert set(original.filter_fqns) == set(reduced.filter_fqns)


@pytest.mark.torchtitan
def test_compile_modes_differ_by_cuda_graphs_only() -> None:
    from torch._inductor import list_mode_options

    def without_graphs(mode: str) -> dict[str, Any]:
        return {name: on for name, on in list_mode_options(mode).items() if name != "triton.cudagraphs"}

    assert without_graphs("reduce-overhead") == without_graphs("default")
    assert without_graphs("max-autotune") == without_graphs("max-autotune-no-cudagraphs")


@settings(max_examples=300, deadline=None)
@given(shorts)
def test_identity_is_that_of_its_tables(short: dict[str, Any]) -> None:
    """Each table's part is found without the others', which also says that no normaliser reads another's."""
    config, values = configuration(**short)
    texts = [table_identity(prefix, values, config) for prefix in identity_tables()]
    whole = identity(values, config, config.model)
    assert join_identity(texts, model_shape(config.model), config.cluster.world_size) == whole
    form = json.loads(whole)
    assert whole == json.dumps(form, sort_keys=True, separators=(",", ":"))
    expected = {key: value for key, value in canonical(values, config).items() if value != defaults()[key]}
    expected = {key: value for key, value in expected.items() if not is_bookkeeping(key)}
    assert form == expected | {
        "model": model_shape(config.model),
        "world_size": config.cluster.world_size,
    }


@settings(max_examples=200, deadline=None)
@given(shorts)
def test_normalisers_write_the_tables_that_they_say(short: dict[str, Any]) -> None:
    config, values = configuration(**short)
    for normalise, prefixes in NORMALISERS.items():
        form = dict(values)
        normalise(form, config)
        changed = {key for key in form if form[key] != values[key]}
        assert all(key.startswith(prefixes) for key in changed)
