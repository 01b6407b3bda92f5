"""Validity of quantization: converters, float8, mxfp8."""

from __future__ import annotations

from collections.abc import Mapping

from titan_tune.domain.candidate import Value
from titan_tune.domain.settings import Settings
from titan_tune.errors import did_you_mean
from titan_tune.titan.rules.facts import PLUGIN, SM89, SM100, capability_text, has_capability, has_mxfp8
from titan_tune.titan.rules.registry import Facts, invalid

Values = Mapping[str, Value]

CONVERTERS = (
    "quantize.linear.float8",
    "quantize.grouped_mm.float8",
    "quantize.linear.mx",
    "quantize.grouped_mm.mx",
)
"""What torchtitan 0.2.2 registers (torchtitan/components/quantization)."""

_RENAMED = {
    "float8": "quantize.linear.float8",
    "mx": "quantize.linear.mx",
    "mxfp8": "quantize.linear.mx",
}
_CUSTOM_IMPORTS = ("titan_tune.custom_import", "experimental.custom_import")


def _may_register_converters(values: Values) -> bool:
    """Whether a module of the user's is imported, which may register converters of its own."""
    return any(values.get(key) not in (None, "", PLUGIN) for key in _CUSTOM_IMPORTS)


@invalid(
    "converter-name",
    "model.converters has {name!r}, which torchtitan does not register",
    fix="use {suggestion}",
)
def converter_name(settings: Settings, values: Values) -> Facts | None:
    """KeyError at start-up (torchtitan/protocols/model_converter.py). "float8" was renamed to
    "quantize.linear.float8" in pull request #1763; the shipped llama3_405b.toml still has the old name."""
    converters = values["model.converters"]
    if not converters:
        return None
    unknown = next((name for name in converters if name not in CONVERTERS), None)
    if unknown is None or _may_register_converters(values):
        return None
    renamed = _RENAMED.get(unknown)
    suggestion = renamed or f"one of {', '.join(CONVERTERS)}{did_you_mean(unknown, CONVERTERS)}"
    return {"name": unknown, "suggestion": suggestion}


@invalid(
    "converter-mix",
    "model.converters mixes {first} and {second}: the quantization types must be the same",
    fix="use float8 or mx for both the linear layers and the experts",
)
def converter_mix(settings: Settings, values: Values) -> Facts | None:
    """Assertion "Cannot combine model converters with different quantization types"
    (torchtitan/components/quantization/__init__.py)."""
    converters = values["model.converters"]
    if len(converters) < 2:
        return None
    quantizers = [name for name in converters if "quantize" in name]
    other = [name for name in quantizers if name.split(".")[-1] != quantizers[0].split(".")[-1]]
    return {"first": quantizers[0], "second": other[0]} if other else None


@invalid(
    "float8-hardware",
    "quantize.linear.float8 on {hardware}: float8 needs SM 8.9 or later",
    fix="remove quantize.linear.float8 from model.converters{emulation}",
)
def float8_hardware(settings: Settings, values: Values) -> Facts | None:
    """ValueError "Failed to swap to Float8Linear because float8 is only supported on SM89 or later", unless
    ``emulate`` without model compile (torchtitan/components/quantization/float8.py)."""
    float8 = settings.float8
    if float8 is None:
        return None
    gpu = settings.cluster.gpu
    if has_capability(gpu, SM89) or (float8.emulate and not settings.compile.model):
        return None
    emulation = "; to try it out, set quantize.linear.float8.emulate = true in eager mode"
    return {"hardware": capability_text(gpu), "emulation": emulation}


@invalid(
    "float8-emulate-recipe",
    'quantize.linear.float8.recipe_name="{recipe}" ignores emulate, and {hardware} has no float8',
    fix="leave quantize.linear.float8.recipe_name unset to emulate",
)
def float8_emulate_recipe(settings: Settings, values: Values) -> Facts | None:
    """With a recipe the configuration comes from ``from_recipe_name`` and ``emulate`` is not passed on
    (torchtitan/components/quantization/float8.py). On CPU torch computes float8 products all the same."""
    float8, gpu = settings.float8, settings.cluster.gpu
    if float8 is None or not float8.emulate or not float8.recipe_named:
        return None
    if gpu.is_cpu or has_capability(gpu, SM89):
        return None
    return {"recipe": float8.recipe, "hardware": capability_text(gpu)}


@invalid(
    "float8-recipe-all-gather",
    'quantize.linear.float8.recipe_name="{recipe}" with enable_fsdp_float8_all_gather = true',
    fix="leave recipe_name unset (it is tensorwise then) to all-gather in float8, or switch the all-gather off",
)
def float8_recipe_all_gather(settings: Settings, values: Values) -> Facts | None:
    """Assertion "using `float8_config.enable_fsdp_float8_all_gather` together with `float8_config.recipe_name` is
    not supported" (torchtitan/components/quantization/float8.py). Seen on H200, torch 2.11."""
    float8 = settings.float8
    if float8 is None or not float8.recipe_named:
        return None
    # read from the file: the typed view may already have dropped an all-gather without effect
    if not values["quantize.linear.float8.enable_fsdp_float8_all_gather"]:
        return None
    return {"recipe": float8.recipe}


@invalid(
    "float8-tensor-parallel-shape",
    "tensor_parallel_degree={tp} leaves {what} {size} of {whole} a rank, not a multiple of 16 as float8 products need",
    fix="use a smaller tensor_parallel_degree, or name the layer in quantize.linear.float8.filter_fqns",
)
def float8_tensor_parallel_shape(settings: Settings, values: Values) -> Facts | None:
    """torchtitan skips layers whose dimensions are not multiples of 16, but looks at the unsharded weight
    (torchtitan/components/quantization/utils.py); ``torch._scaled_mm`` wants it of the shard it gets."""
    float8, tp, model = settings.float8, settings.dims.tp, settings.model
    if float8 is None or tp == 1 or float8.emulate or model.mla is not None or model.moe is not None:
        return None
    shapes = (
        ("attention.wq", "attention heads", model.n_heads * model.head_dim),
        ("attention.wk", "KV heads", model.n_kv_heads * model.head_dim),
        ("feed_forward.w1", "the feed-forward width", model.ffn_hidden_dim),
    )
    for layer, what, whole in shapes:
        if (
            whole % 16 == 0
            and whole % tp == 0
            and (whole // tp) % 16 != 0
            and not _filtered(layer, float8.filter_fqns)
        ):
            return {"tp": tp, "what": what, "size": whole // tp, "whole": whole}
    return None


def _filtered(layer: str, filter_fqns: tuple[str, ...]) -> bool:
    """Whether an entry of ``filter_fqns`` is a substring of the layer's name."""
    return any(entry in layer for entry in filter_fqns)


@invalid(
    "grouped-float8",
    "quantize.grouped_mm.float8 with {problem}",
    fix="remove quantize.grouped_mm.float8 from model.converters, or {alternative}",
)
def grouped_float8(settings: Settings, values: Values) -> Facts | None:
    """ValueError "Float8 MoE training only supported on SM89 or later."; assertions "Float8 MoE training prototype
    does not yet support pipeline parallelism / context parallelism"
    (torchtitan/components/quantization/float8.py)."""
    if not settings.grouped_float8:
        return None
    gpu, dims = settings.cluster.gpu, settings.dims
    if not has_capability(gpu, SM89):
        return {
            "problem": f"{capability_text(gpu)}: it needs SM 8.9 or later",
            "alternative": "use such a GPU",
        }
    for key, degree in (("pipeline_parallel_degree", dims.pp), ("context_parallel_degree", dims.cp)):
        if degree > 1:
            return {"problem": f"{key}={degree}", "alternative": f"set parallelism.{key} = 1"}
    return None


@invalid(
    "mxfp8-hardware",
    "{converter} on {hardware}: mxfp8 needs {needs}",
    fix="remove {converter} from model.converters; quantize.linear.float8 needs only SM 8.9",
)
def mxfp8_hardware(settings: Settings, values: Values) -> Facts | None:
    """Assertions "MXFP8 is only supported on CUDA SM100 or later, or ROCm gfx950 or later" (linear) and "MXFP8 is
    only supported on SM100 or architectures" (grouped) (torchtitan/components/quantization/mx.py)."""
    if not (settings.mxfp8 or settings.grouped_mxfp8):
        return None
    gpu = settings.cluster.gpu
    if settings.mxfp8 and not has_mxfp8(gpu):
        needs, converter = "SM 10.0 or gfx950", "quantize.linear.mx"
    elif settings.grouped_mxfp8 and not has_capability(gpu, SM100):
        needs, converter = "SM 10.0", "quantize.grouped_mm.mx"
    else:
        return None
    return {"converter": converter, "hardware": capability_text(gpu), "needs": needs}


@invalid(
    "mxfp8-tensor-parallel-compile",
    "quantize.linear.mx with tensor_parallel_degree={tp} and a compiled model",
    fix='set parallelism.tensor_parallel_degree = 1, or compile.enable = false or compile.components = ["loss"]',
)
def mxfp8_tensor_parallel_compile(settings: Settings, values: Values) -> Facts | None:
    """Assertion "TP not yet supported with torch.compile for mxfp8" (torchtitan/components/quantization/mx.py;
    torchtitan issue #2401)."""
    if not settings.mxfp8 or settings.dims.tp == 1 or not settings.compile.model:
        return None
    return {"tp": settings.dims.tp}
