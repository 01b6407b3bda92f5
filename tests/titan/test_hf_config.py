from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.catalog.loader import model_spec
from titan_tune.catalog.shapes import swiglu_hidden_dim
from titan_tune.errors import InputError
from titan_tune.titan.hf_config import model_args_from_hf, swiglu_args

# the published config.json files, without the fields that do not concern the shape
LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL_7B_V03: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def convert(tmp_path: Path, config: Any) -> tuple[str, dict[str, Any]]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return model_args_from_hf(tmp_path / "config.json")


def test_llama_is_torchtitans_own_8b(tmp_path: Path) -> None:
    name, args = convert(tmp_path, LLAMA_31_8B)
    assert name == "llama3"
    spec = model_spec(name, "8B", model_args=args)
    assert spec.model_copy(update={"model_args": {}}) == model_spec("llama3", "8B")
    assert args["rope_scaling_args"]["scaling_factor"] == 8
    assert args["rope_theta"] == 500000
    assert model_args_from_hf(tmp_path) == (name, args)


def test_mistral_has_no_rope_scaling(tmp_path: Path) -> None:
    name, args = convert(tmp_path, MISTRAL_7B_V03)
    spec = model_spec(name, "mistral", model_args=args)
    assert (name, spec.ffn_hidden_dim, spec.vocab_size, spec.max_seq_len) == ("llama3", 14336, 32768, 32768)
    # torchtitan's llama3 always scales; a factor of one leaves every frequency as it is
    assert args["rope_scaling_args"] == {"scaling_factor": 1.0}


def test_qwen3_is_torchtitans_own(tmp_path: Path) -> None:
    name, args = convert(tmp_path, QWEN3_06B)
    spec = model_spec(name, "0.6B", model_args=args)
    own = model_spec("qwen3", "0.6B").model_copy(update={"max_seq_len": 40960, "model_args": spec.model_args})
    assert (name, spec) == ("qwen3", own)


def test_llama2_has_as_many_kv_heads(tmp_path: Path) -> None:
    config = {key: value for key, value in MISTRAL_7B_V03.items() if key != "num_key_value_heads"}
    config |= {"architectures": ["LlamaForCausalLM"], "intermediate_size": 11008}
    name, args = convert(tmp_path, config)
    spec = model_spec(name, "7B", model_args=args)
    assert (spec.n_kv_heads, spec.ffn_hidden_dim) == (32, 11008)
    assert args["multiple_of"] == 256
    assert "ffn_dim_multiplier" not in args


def test_transformers_5_rope_parameters(tmp_path: Path) -> None:
    old = {key: value for key, value in LLAMA_31_8B.items() if key not in ("rope_scaling", "rope_theta")}
    new = old | {"rope_parameters": {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0}}
    assert convert(tmp_path, new) == convert(tmp_path, LLAMA_31_8B)
    plain = old | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert convert(tmp_path, plain)[1]["rope_scaling_args"] == {"scaling_factor": 1.0}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA_31_8B | {"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "LlamaForCausalLM"]),
        (LLAMA_31_8B | {"architectures": None, "model_type": "gemma2"}, ["gemma2", "Qwen3ForCausalLM"]),
        ({}, ["no architecture"]),
        ([1], ["no JSON object"]),
        (LLAMA_31_8B | {"tie_word_embeddings": True}, ["tie_word_embeddings", "+525,336,576 parameters"]),
        (LLAMA_31_8B | {"head_dim": 160}, ["head_dim = 160", "4096 / 32"]),
        (LLAMA_31_8B | {"attention_bias": True}, ["attention_bias"]),
        (LLAMA_31_8B | {"mlp_bias": True}, ["mlp_bias"]),
        (LLAMA_31_8B | {"hidden_act": "gelu"}, ["hidden_act", '"gelu"']),
        (LLAMA_31_8B | {"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling", "linear"]),
        (LLAMA_31_8B | {"rope_scaling": {"rope_type": "llama3"}}, ["factor missing"]),
        (LLAMA_31_8B | {"hidden_size": "4096"}, ["hidden_size", '"4096"']),
        (LLAMA_31_8B | {"vocab_size": None}, ["vocab_size missing"]),
        (LLAMA_31_8B | {"rope_theta": 0}, ["rope_theta = 0"]),
        (MISTRAL_7B_V03 | {"sliding_window": 4096}, ["sliding_window = 4096", "null"]),
        (QWEN3_06B | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["qwen3", "yarn"]),
        (QWEN3_06B | {"use_sliding_window": True, "sliding_window": 4096}, ["sliding_window = 4096"]),
        (QWEN3_06B | {"head_dim": "128"}, ["head_dim"]),
    ],
)
def test_what_torchtitan_cannot_build_is_refused(tmp_path: Path, config: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        convert(tmp_path, config)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "config.json"))
    assert all(word in message for word in words), message
    assert len(message.splitlines()) == 1


def test_windows_as_long_as_the_context_change_nothing(tmp_path: Path) -> None:
    wide = convert(tmp_path, MISTRAL_7B_V03 | {"sliding_window": 32768})
    assert wide == convert(tmp_path, MISTRAL_7B_V03)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        model_args_from_hf(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        model_args_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        model_args_from_hf(tmp_path)


@settings(max_examples=500, deadline=None)
@given(dim=st.integers(1, 40000), hidden_dim=st.integers(1, 300000))
def test_feed_forward_size_is_exact(dim: int, hidden_dim: int) -> None:
    args = {"ffn_dim_multiplier": None, **swiglu_args(dim, hidden_dim)}
    assert swiglu_hidden_dim(dim, **args) == hidden_dim


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**6) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
FIELDS = sorted({*LLAMA_31_8B, *QWEN3_06B, "rope_parameters"})


@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from([LLAMA_31_8B, MISTRAL_7B_V03, QWEN3_06B]),
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)
def test_any_config_is_taken_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, base: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        name, args = convert(tmp_path_factory.getbasetemp(), base | changes)
        spec = model_spec(name, "x", model_args=args)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert spec.ffn_hidden_dim == (base | changes)["intermediate_size"]


def test_feed_forward_arguments_are_short() -> None:
    """Common sizes need few decimals, as torchtitan's own flavors do."""
    assert swiglu_args(4096, 11008) == {"multiple_of": 256}
    assert swiglu_args(4096, 14336) == {"multiple_of": 2048, "ffn_dim_multiplier": 1.2}
    assert swiglu_args(8192, 28672) == {"multiple_of": 4096, "ffn_dim_multiplier": 1.2}
