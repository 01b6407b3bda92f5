from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.catalog import loader
from titan_tune.catalog.loader import (
    check_model_args,
    flatten,
    flavors,
    model_arg_keys,
    model_names,
    model_spec,
    nest,
    parameter_count,
)
from titan_tune.catalog.shapes import swiglu_hidden_dim
from titan_tune.errors import InputError

ROOT = Path(__file__).parents[2]
EVERY_FLAVOR = [(name, flavor) for name in model_names() for flavor in flavors(name)]


def measured(name: str, flavor: str) -> dict[str, int]:
    found: dict[str, int] = loader._flavor(name, flavor)["measured"]
    return found


@pytest.mark.parametrize(("name", "flavor"), EVERY_FLAVOR)
def test_sizes_are_those_of_the_built_modules(name: str, flavor: str) -> None:
    """models.json records what torchtitan's modules have; the shapes are computed here."""
    spec, built = model_spec(name, flavor), measured(name, flavor)
    if "ffn_hidden_dim" in built:
        assert spec.ffn_hidden_dim == built["ffn_hidden_dim"]
    assert (spec.moe is not None) == ("expert_hidden_dim" in built)
    if spec.moe is not None:
        assert spec.moe.expert_hidden_dim == built["expert_hidden_dim"]
        moe_layers = [
            layer
            for layer in range(spec.n_layers)
            if layer >= spec.moe.num_dense_layers and (layer + 1) % spec.moe.layer_step == 0
        ]
        assert len(moe_layers) == built["moe_layers"]


def dense_parameters(name: str, flavor: str) -> int:
    """Independent count of a dense model: embeddings, blocks, norms."""
    m = model_spec(name, flavor)
    attention = m.dim * m.head_dim * (2 * m.n_heads + 2 * m.n_kv_heads) + (2 * m.head_dim if m.qk_norm else 0)
    block = attention + 3 * m.dim * m.ffn_hidden_dim + 2 * m.dim
    return m.n_layers * block + m.dim + m.vocab_size * m.dim * (1 if m.tied_embeddings else 2)


@pytest.mark.parametrize(("name", "flavor"), [pair for pair in EVERY_FLAVOR if not model_spec(*pair).moe])
def test_dense_parameter_counts(name: str, flavor: str) -> None:
    assert parameter_count(name, flavor) == dense_parameters(name, flavor)


@pytest.mark.parametrize(
    ("flavor", "expected"), [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)]
)
def test_llama3_counts_are_the_published_ones(flavor: str, expected: int) -> None:
    assert parameter_count("llama3", flavor) == expected


def test_shapes() -> None:
    llama = model_spec("llama3", "8B")
    assert llama.is_dense_llama
    assert (llama.n_kv_heads, llama.head_dim, llama.max_seq_len, llama.model_args) == (8, 128, 131072, {})
    assert model_spec("llama3", "debugmodel").n_kv_heads == 16
    assert model_spec("llama3", "8B_flex").attention == "flex"
    qwen = model_spec("qwen3", "0.6B")
    assert (qwen.qk_norm, qwen.tied_embeddings, qwen.is_dense_llama) == (True, True, False)
    deepseek = model_spec("deepseek_v3", "671B")
    assert deepseek.mla is not None
    assert deepseek.moe is not None
    assert (deepseek.mla.kv_lora_rank, deepseek.head_dim, deepseek.moe.num_dense_layers) == (512, 192, 3)
    maverick = model_spec("llama4", "17bx128e")
    assert maverick.moe is not None
    assert maverick.moe.layer_step == 2


def test_seq_len_is_what_torchtitan_makes_of_it() -> None:
    assert model_spec("llama3", "8B", seq_len=4096).max_seq_len == 4096


def test_model_args_define_the_flavor_afresh() -> None:
    spec = model_spec("llama3", "70B", model_args={"n_layers": 4, "n_kv_heads": 8})
    # dim, heads and the multiplier are the class's defaults, not the 70B's
    assert (spec.dim, spec.n_layers, spec.n_heads, spec.n_kv_heads) == (4096, 4, 32, 8)
    assert spec.ffn_hidden_dim == 11008
    assert spec.flavor == "70B"
    assert spec.model_args == {"n_layers": 4, "n_kv_heads": 8}


def test_llama_1b_by_model_args() -> None:
    args = {
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 32,
        "n_kv_heads": 8,
        "ffn_dim_multiplier": 1.5,
        "multiple_of": 256,
        "rope_theta": 500000,
    }
    assert model_spec("llama3", "1B", model_args=args).ffn_hidden_dim == 8192


def test_nested_and_dotted_model_args_are_the_same() -> None:
    nested = {"moe_enabled": True, "moe_args": {"num_experts": 16, "top_k": 2}}
    dotted = {"moe_enabled": True, "moe_args.num_experts": 16, "moe_args.top_k": 2}
    spec = model_spec("qwen3", "x", model_args=nested)
    assert spec == model_spec("qwen3", "x", model_args=dotted)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.top_k, spec.model_args) == (16, 2, nested)


@pytest.mark.parametrize(("name", "flavor"), EVERY_FLAVOR)
def test_a_flavor_equals_its_own_model_args(name: str, flavor: str) -> None:
    args = loader._flavor(name, flavor)["model_args"]
    if args:
        custom = model_spec(name, flavor, model_args=args)
        assert custom.model_copy(update={"model_args": {}}) == model_spec(name, flavor)


@pytest.mark.parametrize(
    ("name", "flavor", "args", "words"),
    [
        ("lama3", "8B", {}, ["model.name", "'lama3'", "did you mean llama3", "qwen3"]),
        ("llama3", "8b", {}, ["model.flavor", "'8b'", "did you mean 8B", "405B"]),
        ("llama3", "x", {"dims": 8}, ["titan_tune.model_args.dims", "did you mean dim"]),
        ("llama3", "x", {"hidden_dim": 8}, ["titan_tune.model_args.hidden_dim", "llama3", "fields: dim"]),
        ("llama3", "x", {"dim": "8"}, ["titan_tune.model_args.dim", '"8"', "whole number"]),
        ("llama3", "x", {"dim": 0}, ["titan_tune.model_args.dim = 0"]),
        ("llama3", "x", {"n_heads": 32, "n_kv_heads": 6}, ["n_heads = 32", "n_kv_heads = 6"]),
        ("llama3", "x", {"dim": 96, "n_heads": 32}, ["head size is 3"]),
        ("llama3", "x", {"attn_type": "flash"}, ["sdpa, flex, varlen"]),
        ("llama3", "x", {"ffn_dim_multiplier": 1e-6}, ["feed-forward size zero"]),
        ("llama3", "x", {"moe_args": {"top_k": 2}}, ["titan_tune.model_args.moe_args.top_k"]),
        ("qwen3", "x", {"moe_enabled": True, "moe_args": {"top_k": 9}}, ["top_k = 9", "num_experts = 8"]),
    ],
)
def test_wrong_models_are_one_line(name: str, flavor: str, args: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        model_spec(name, flavor, model_args=args)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_check_model_args_names_the_source() -> None:
    with pytest.raises(InputError, match=r"^a\.toml: titan_tune\.model_args\.dim = 1\.5"):
        check_model_args("llama3", {"dim": 1.5}, source="a.toml")


NAMES = st.text("abc", min_size=1, max_size=3)
TREES = st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3))


@settings(deadline=None)
@given(st.dictionaries(NAMES, TREES, max_size=4))
def test_nest_inverts_flatten(table: dict[str, Any]) -> None:
    assert nest(flatten(table)) == table


@settings(deadline=None)
@given(
    dim=st.integers(1, 50000),
    multiple_of=st.integers(1, 5000),
    multiplier=st.none() | st.floats(0.01, 10, allow_nan=False),
)
def test_swiglu_size_is_the_multiple_at_or_above(
    dim: int, multiple_of: int, multiplier: float | None
) -> None:
    size = swiglu_hidden_dim(dim, multiple_of=multiple_of, ffn_dim_multiplier=multiplier)
    wanted = 8 * dim / 3 * (1 if multiplier is None else multiplier)
    assert size % multiple_of == 0
    # torchtitan truncates twice before it rounds up
    assert wanted - 1 - (multiplier or 0) - 1e-6 * wanted <= size < wanted * (1 + 1e-9) + multiple_of
    assert math.isfinite(size)


def tool(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module(name)


@pytest.mark.torchtitan
def test_models_json_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds all flavors on the meta device: parameter counts and sizes to the integer."""
    made = tool("make_models", monkeypatch).build()
    text = (ROOT / "titan_tune/catalog/models.json").read_text(encoding="utf-8")
    assert json.loads(json.dumps(made)) == json.loads(text)


@pytest.mark.torchtitan
@settings(max_examples=100, deadline=None)
@given(
    dim=st.integers(1, 3000),
    multiple_of=st.integers(1, 600),
    multiplier=st.none() | st.floats(0.01, 8, allow_nan=False),
)
def test_swiglu_size_is_torchtitans(dim: int, multiple_of: int, multiplier: float | None) -> None:
    import torch
    from torchtitan.models.llama3.model.model import FeedForward

    size = swiglu_hidden_dim(dim, multiple_of=multiple_of, ffn_dim_multiplier=multiplier)
    with torch.device("meta"):
        built = FeedForward(dim, 4 * dim, multiple_of=multiple_of, ffn_dim_multiplier=multiplier)
    assert built.w1.out_features == size


@pytest.mark.torchtitan
@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([(8, 8), (8, 2), (6, 3), (4, None)]),
    head_dim=st.integers(1, 40).map(lambda half: 2 * half),
    n_layers=st.integers(1, 3),
    multiple_of=st.integers(1, 300),
    multiplier=st.none() | st.floats(0.5, 3),
    vocab_size=st.integers(1, 1000),
)
def test_custom_llama3_matches_the_real_model(
    heads: tuple[int, int | None],
    head_dim: int,
    n_layers: int,
    multiple_of: int,
    multiplier: float | None,
    vocab_size: int,
) -> None:
    import torch
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    n_heads, n_kv_heads = heads
    args: dict[str, Any] = {
        "dim": n_heads * head_dim,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "multiple_of": multiple_of,
        "vocab_size": vocab_size,
    }
    args |= {"n_kv_heads": n_kv_heads} if n_kv_heads else {}
    args |= {"ffn_dim_multiplier": multiplier} if multiplier else {}
    spec = model_spec("llama3", "custom", model_args=args)
    with torch.device("meta"):
        model = Transformer(TransformerModelArgs(**args, max_seq_len=16))
    block = model.layers["0"]
    assert block.feed_forward.w1.out_features == spec.ffn_hidden_dim
    assert block.attention.wk.out_features == spec.n_kv_heads * spec.head_dim
    attention = spec.dim * spec.head_dim * (2 * spec.n_heads + 2 * spec.n_kv_heads)
    per_block = attention + 3 * spec.dim * spec.ffn_hidden_dim + 2 * spec.dim
    expected = spec.n_layers * per_block + spec.dim + 2 * spec.vocab_size * spec.dim
    assert sum(p.numel() for p in model.parameters()) == expected


def test_model_args_fields_are_torchtitans_names() -> None:
    assert {"dim", "n_layers", "ffn_dim_multiplier", "multiple_of", "rope_theta"} <= set(
        model_arg_keys("llama3")
    )
    assert "_enforced" not in model_arg_keys("llama3")
