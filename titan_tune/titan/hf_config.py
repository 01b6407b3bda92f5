"""A Hugging Face ``config.json`` → torchtitan model arguments.

Llama and Mistral map to torchtitan's llama3, Qwen3 to its qwen3. What torchtitan 0.2.2 cannot build is
refused with the field that stands in the way, never approximated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan_tune.catalog.shapes import MAX_SIZE, swiglu_hidden_dim
from titan_tune.catalog.typed import plain, show
from titan_tune.errors import InputError
from titan_tune.titan.job import read_text

Config = Mapping[str, Any]


def model_args_from_hf(path: Path | str) -> tuple[str, dict[str, Any]]:
    """torchtitan's ``model.name`` and the model arguments that build the model of a ``config.json``.

    ``path`` is the file or its folder. The feed-forward size comes out exact. A Llama without RoPE
    scaling gets a scaling factor of 1, since torchtitan's llama3 always scales.

    Raises:
        InputError: unreadable file, an unsupported architecture, or a feature that torchtitan's model
            does not have.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = _load(path)
    source = str(path)
    architecture = _architecture(config, source)
    name, convert = _ARCHITECTURES[architecture]
    return name, convert(config, source)


def _load(path: Path) -> Config:
    try:
        config = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # ValueError itself: an integer of more than 4300 digits
        raise InputError(f"{path}: is not valid JSON: {plain(str(error))}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: is not a Hugging Face config (no JSON object)")
    return config


def _architecture(config: Config, source: str) -> str:
    listed = config.get("architectures") or []
    found = (
        listed[0] if isinstance(listed, list) and listed else _MODEL_TYPES.get(str(config.get("model_type")))
    )
    if not isinstance(found, str) or found not in _ARCHITECTURES:
        shown = plain(str(found or config.get("model_type") or "no architecture"))
        raise InputError(f"{source}: {shown} is not supported; architectures: {', '.join(_ARCHITECTURES)}")
    return found


def _llama(config: Config, source: str) -> dict[str, Any]:
    dim, n_heads = _size(config, "hidden_size", source), _size(config, "num_attention_heads", source)
    _refuse_biases(config, source)
    _refuse_window(config, source)
    if config.get("tie_word_embeddings", False):
        raise InputError(
            f"{source}: tie_word_embeddings = true: torchtitan's llama3 has its own output matrix; set it to "
            f"false in a copy of the file to train that (+{_size(config, 'vocab_size', source) * dim:,} parameters)"
        )
    head_dim = _size_or(config, "head_dim", dim // n_heads, source)
    if head_dim * n_heads != dim:
        raise InputError(
            f"{source}: head_dim = {head_dim}: torchtitan's llama3 has hidden_size / num_attention_heads "
            f"({dim} / {n_heads}) and no other head size"
        )
    return {
        "dim": dim,
        "n_layers": _size(config, "num_hidden_layers", source),
        "n_heads": n_heads,
        "n_kv_heads": _size_or(config, "num_key_value_heads", n_heads, source),
        "vocab_size": _size(config, "vocab_size", source),
        **swiglu_args(dim, _size(config, "intermediate_size", source)),
        "norm_eps": _number(config, "rms_norm_eps", 1e-6, source),
        "rope_theta": _rope_theta(config, source),
        "rope_scaling_args": _llama_scaling(config, source),
        "max_seq_len": _size(config, "max_position_embeddings", source),
    }


def _qwen3(config: Config, source: str) -> dict[str, Any]:
    _refuse_biases(config, source)
    if config.get("use_sliding_window", False):
        _refuse_window(config, source)
    kind, _ = _rope_scaling(config, source)
    if kind != "default":
        raise InputError(
            f"{source}: rope_scaling of type {plain(kind)}: torchtitan's qwen3 has no RoPE scaling"
        )
    n_heads = _size(config, "num_attention_heads", source)
    return {
        "dim": _size(config, "hidden_size", source),
        "n_layers": _size(config, "num_hidden_layers", source),
        "n_heads": n_heads,
        "n_kv_heads": _size_or(config, "num_key_value_heads", n_heads, source),
        "vocab_size": _size(config, "vocab_size", source),
        "head_dim": _size_or(config, "head_dim", 128, source),
        "hidden_dim": _size(config, "intermediate_size", source),
        "norm_eps": _number(config, "rms_norm_eps", 1e-6, source),
        "rope_theta": _rope_theta(config, source),
        "qk_norm": True,
        "max_seq_len": _size(config, "max_position_embeddings", source),
        "enable_weight_tying": bool(config.get("tie_word_embeddings", False)),
    }


_ARCHITECTURES: Mapping[str, tuple[str, Callable[[Config, str], dict[str, Any]]]] = {
    "LlamaForCausalLM": ("llama3", _llama),
    "MistralForCausalLM": ("llama3", _llama),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
}
_MODEL_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def swiglu_args(dim: int, hidden_dim: int) -> dict[str, Any]:
    """``multiple_of`` and ``ffn_dim_multiplier`` that make torchtitan's llama3 round to ``hidden_dim``.

    ``multiple_of`` is the largest power of two up to 4096 that divides ``hidden_dim``. The multiplier is
    left out where the plain two thirds of 4·dim do, else it has the fewest decimals that give the exact
    size.
    """
    multiple_of = min(hidden_dim & -hidden_dim, 4096)
    if swiglu_hidden_dim(dim, multiple_of=multiple_of, ffn_dim_multiplier=None) == hidden_dim:
        return {"multiple_of": multiple_of}
    # aim at the middle of the sizes that are rounded up to hidden_dim
    exact = (hidden_dim - multiple_of / 2 + 0.5 * (multiple_of == 1) + 0.5) / int(2 * (4 * dim) / 3)
    for decimals in range(1, 17):
        multiplier = round(exact, decimals)
        if swiglu_hidden_dim(dim, multiple_of=multiple_of, ffn_dim_multiplier=multiplier) == hidden_dim:
            return {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}
    return {"multiple_of": multiple_of, "ffn_dim_multiplier": exact}


def _size(config: Config, field: str, source: str) -> int:
    value = config.get(field)
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        shown = "missing" if value is None else f"= {show(value)}"
        raise InputError(f"{source}: {field} {shown}: must be a whole number from 1 to {MAX_SIZE}")
    return value


def _size_or(config: Config, field: str, default: int, source: str) -> int:
    return default if config.get(field) is None else _size(config, field, source)


def _refuse_biases(config: Config, source: str) -> None:
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field, False):
            raise InputError(f"{source}: {field} = true: torchtitan's linear layers have no biases")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise InputError(
            f"{source}: hidden_act = {show(activation)}: torchtitan's feed-forward is SwiGLU (silu)"
        )


def _refuse_window(config: Config, source: str) -> None:
    if config.get("sliding_window") is None:
        return
    window = _size(config, "sliding_window", source)
    if window < _size(config, "max_position_embeddings", source):
        raise InputError(
            f"{source}: sliding_window = {window}: torchtitan attends to the whole sequence; set it to null in a "
            "copy of the file to train that"
        )


def _number(table: Config, field: str, default: float | None, source: str) -> float:
    value = table.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        shown = "missing" if value is None else f"= {show(value)}"
        raise InputError(f"{source}: {field} {shown}: must be a number above 0")
    return float(value)


def _rope_theta(config: Config, source: str) -> float:
    _, parameters = _rope_scaling(config, source)
    return _number(parameters if "rope_theta" in parameters else config, "rope_theta", 10000.0, source)


def _rope_scaling(config: Config, source: str) -> tuple[str, Config]:
    """Kind and parameters; transformers 5 writes ``rope_parameters`` for ``rope_scaling``."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise InputError(f"{source}: rope_scaling = {show(scaling)}: must be an object")
    return str(scaling.get("rope_type", scaling.get("type", "default"))), scaling


def _llama_scaling(config: Config, source: str) -> dict[str, Any]:
    kind, scaling = _rope_scaling(config, source)
    if kind == "default":
        return {"scaling_factor": 1.0}
    if kind != "llama3":
        raise InputError(
            f"{source}: rope_scaling of type {plain(kind)}: torchtitan's llama3 has Llama 3.1 scaling "
            "(type llama3) only"
        )
    return {
        "scaling_factor": _number(scaling, "factor", None, source),
        "low_freq_factor": _number(scaling, "low_freq_factor", None, source),
        "high_freq_factor": _number(scaling, "high_freq_factor", None, source),
        "original_max_position_embeddings": _size(scaling, "original_max_position_embeddings", source),
    }
