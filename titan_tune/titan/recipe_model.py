"""The model of a Python recipe: the config function it starts from, its flavor, its quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_tune.catalog.loader import flatten, model_arg_keys
from titan_tune.catalog.typed import printable, show
from titan_tune.errors import InputError
from titan_tune.titan.job import Job
from titan_tune.titan.keys import defaults
from titan_tune.titan.recipe_keys import (
    VERSION,
    Flavor,
    partly_fused,
    renamed_filters,
    shortest,
    small_linears,
)
from titan_tune.titan.recipe_text import Recipe, literal, remark

QUANTIZATION = "torchtitan.components.quantization"
FLOAT8 = "quantize.linear.float8"
MX = "quantize.linear.mx"
AUTO_FILTER = "auto_filter_small_kn"
"""torchao's word for its own choice of small ``Linear``s."""
GROUPED_FLOAT8 = "quantize.grouped_mm.float8"
GROUPED_MX = "quantize.grouped_mm.mx"
RMS_NORM_EPS = 1e-5
"""0.3.0's default ``RMSNorm.Config.eps``."""


def model_lines(recipe: Recipe, job: Job, flavor: Flavor) -> list[str]:
    """Statements that make ``c``, with the model of the job in ``c.model_spec``."""
    package = f"torchtitan.models.{flavor.model}"
    arguments = [literal(flavor.name)]
    if flavor.attention:
        arguments.append(f"attn_backend={literal(flavor.attention)}")
    if _expert_backend(job) != "standard":
        arguments.append(f"moe_comm_backend={literal(_expert_backend(job))}")
    registry = f"model_registry({', '.join(arguments)})"
    function = flavor.entry["function"]
    model = f"model.name = {show(flavor.model)}, model.flavor = {show(job.model.flavor)}"
    if function:
        recipe.use(f"{package}.config_registry", function)
        lines = [remark(f"c = {function}()", model)]
        if len(arguments) > 1:
            recipe.use(package, "model_registry")
            lines.append(f"c.model_spec = {registry}")
    else:
        recipe.use(package, "model_registry")
        recipe.use("torchtitan.components.loss", "ChunkedLossWrapper", "CrossEntropyLoss")
        recipe.use("torchtitan.hf_datasets.text_datasets", "HuggingFaceTextDataLoader")
        recipe.use("torchtitan.models.common.config_utils", "decoder_vocab_size")
        lines = _custom_llama(recipe, job, flavor) if flavor.custom else [remark(f"spec = {registry}", model)]
        lines += [
            "c = Trainer.Config(",
            "    model_spec=spec,",
            "    loss=ChunkedLossWrapper.Config(",
            "        loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))",
            "    ),",
            "    dataloader=HuggingFaceTextDataLoader.Config(),",
            ")",
        ]
    seq_len = job.get("training.seq_len")
    if not flavor.custom and seq_len > flavor.entry["max_seq_len"]:
        recipe.use("torchtitan.models.common", "RoPE")
        lines += [
            f"for _, rope, _, _ in c.model_spec.model.traverse(RoPE.Config):  # {VERSION} refuses longer sequences",
            f"    rope.max_seq_len = {seq_len}",
        ]
    return lines


def _expert_backend(job: Job) -> str:
    parallel = job.model.moe is not None and job.get("parallelism.expert_parallel_degree") > 1
    return str(job.get("parallelism.expert_parallel_comm_backend")) if parallel else "standard"


def _custom_llama(recipe: Recipe, job: Job, flavor: Flavor) -> list[str]:
    """Statements that make ``spec`` of ``[titan_tune.model_args]``, from the parts of llama3's own flavors.

    Raises:
        InputError: an argument that 0.3.0's llama3 has no counterpart of.
    """
    package = "torchtitan.models.llama3"
    args = {name: key.default for name, key in model_arg_keys("llama3").items()} | flatten(job.model_args)
    if not args["depth_init"]:
        raise InputError(
            f"{job.name}: titan_tune.model_args.depth_init = false: llama3 of torchtitan {VERSION} initializes by "
            "depth; a Python recipe takes: true"
        )
    recipe.use("dataclasses", "replace")
    recipe.use(
        package, "Llama3Model", "_EMBEDDING_INIT", "_NORM_INIT", "_build_llama3_layers", "_output_linear_init"
    )
    recipe.use("torchtitan.models.common", "ComplexRoPE", "Embedding", "Linear", "RMSNorm")
    model = job.model
    shape = {"in_features": model.dim, "out_features": model.vocab_size}
    embedding = {"num_embeddings": model.vocab_size, "embedding_dim": model.dim}
    rope = {
        "dim": model.head_dim,
        "max_seq_len": max(args["max_seq_len"], job.get("training.seq_len")),
        "theta": args["rope_theta"],
        "scaling": "llama",
        **{name.removeprefix("rope_scaling_args."): value for name, value in args.items()
           if name.startswith("rope_scaling_args.")},
    }  # fmt: skip
    layers = {
        "n_layers": model.n_layers,
        "dim": model.dim,
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "hidden_dim": model.ffn_hidden_dim,
        "attn_backend": flavor.attention or flavor.default_attention,
    }
    lines = [
        "model = Llama3Model.Config(  # [titan_tune.model_args]",
        f"    dim={model.dim},",
        f"    vocab_size={model.vocab_size},",
        f"    tok_embeddings=Embedding.Config({_arguments(embedding)}, param_init=_EMBEDDING_INIT),",
        f"    norm=RMSNorm.Config(normalized_shape={model.dim}, param_init=_NORM_INIT),",
        f"    lm_head=Linear.Config({_arguments(shape)}, param_init=_output_linear_init({model.dim})),",
        "    layers=_build_llama3_layers(",
        f"        {_arguments(layers)},",
        f"        rope=ComplexRoPE.Config({_arguments(rope)}),",
        "    ),",
        ")",
    ]
    if args["norm_eps"] != RMS_NORM_EPS:
        lines += [
            "for _, norm, _, _ in model.traverse(RMSNorm.Config):",
            f"    norm.eps = {literal(args['norm_eps'])}",
        ]
    own = literal(model.flavor)
    return [*lines, f"spec = replace(model_registry({literal(flavor.name)}), flavor={own}, model=model)"]


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in values.items())


def quantization_lines(
    recipe: Recipe, job: Job, flavor: Flavor, names: Mapping[str, tuple[str, ...]], *, compiled: bool
) -> list[str]:
    """Statements that convert the model, and comments for what 0.3.0 cannot do."""
    converters = list(dict.fromkeys(job.get("model.converters")))
    lines = []
    for converter in converters:
        if converter == FLOAT8:
            lines += _float8(recipe, job, flavor, names, compiled)
        elif converter == MX:
            lines += _mx(recipe, job, names, compiled)
        elif converter in (GROUPED_FLOAT8, GROUPED_MX):
            lines += _grouped(recipe, job, converter, compiled)
        else:
            what = f"model.converters: {show(converter)}: no such converter in torchtitan {VERSION}"
            recipe.lost.append(what)
            lines.append(f"# gone in 0.3: {what}")
    used = tuple(f"{converter}." for converter in converters)
    for key, value in job.resolved().items():
        if key.startswith("quantize.") and not key.startswith(used) and value != defaults()[key]:
            lines.append(f"# no effect: {key} = {show(value)}, without its model.converters")
    return lines


def _convert(name: str, arguments: Mapping[str, Any], comment: str) -> list[str]:
    given = [f"    {argument}={literal(value)}," for argument, value in arguments.items()]
    return [f"# {printable(comment)}", f"{name}.Config(", *given, ").build().convert(c.model_spec.model)"]


def _float8(
    recipe: Recipe, job: Job, flavor: Flavor, names: Mapping[str, tuple[str, ...]], compiled: bool
) -> list[str]:
    given, name = job.get(f"{FLOAT8}.filter_fqns"), job.get(f"{FLOAT8}.recipe_name") or "tensorwise"
    what = f"{FLOAT8}: recipe_name = {show(name)}, filter_fqns = {show(given)}"
    by_name = [part for part in given if part != AUTO_FILTER]
    arguments: dict[str, Any] = {
        "recipe_name": "rowwise" if name == "tensorwise" else name,
        "filter_fqns": renamed_filters(by_name, names),
        "model_compile_enabled": bool(compiled),
    }
    if AUTO_FILTER in given and not flavor.custom:
        arguments["filter_fqns"] = list(dict.fromkeys([*arguments["filter_fqns"], *small_linears(flavor)]))
        what += f"; {AUTO_FILTER} would leave out every Linear in {VERSION}: the small ones by name"
    elif AUTO_FILTER in given:
        recipe.lost.append(
            f"{FLOAT8}.filter_fqns: {AUTO_FILTER}: it would leave out every Linear in {VERSION}"
        )
    if job.get(f"{FLOAT8}.emulate"):
        arguments["emulate"] = True
    lines = _convert("Float8LinearConverter", arguments, what + _fused(by_name, names))
    if name == "tensorwise":
        recipe.lost.append(f"{what}: tensorwise float8 is gone in 0.3, so this model trains in bfloat16")
        lines = [
            "# gone in 0.3: tensorwise float8. With rowwise float8, other numerics and another speed, it would be:",
            f"# from {QUANTIZATION} import Float8LinearConverter",
            *[f"# {line.removeprefix('# ')}" for line in lines],
        ]
    else:
        recipe.use(QUANTIZATION, "Float8LinearConverter")
    if job.get(f"{FLOAT8}.emulate") and name != "tensorwise":
        recipe.lost.append(f"{FLOAT8}.emulate = true: {VERSION} emulates tensorwise, whatever the recipe")
    for key in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"):
        if job.get(f"{FLOAT8}.{key}"):
            lines.append(f"# gone in 0.3: {FLOAT8}.{key} = true: it was for tensorwise float8")
    if job.get(f"{FLOAT8}.emulate"):
        lines.append(f"# {FLOAT8}.emulate = true")
    return lines


def _fused(given: list[str], names: Mapping[str, tuple[str, ...]]) -> str:
    return "; q, k and v are one Linear in 0.3" if partly_fused(given, names) else ""


def _mx(recipe: Recipe, job: Job, names: Mapping[str, tuple[str, ...]], compiled: bool) -> list[str]:
    given = job.get(f"{MX}.filter_fqns")
    skipped = renamed_filters(given, names)
    wanted = [name for name in names if not any(part in name for part in skipped)]
    fqns = ["layers"] if wanted == [name for name in names if name != "lm_head"] else shortest(wanted, names)
    what = f"{MX}: filter_fqns = {show(given)}"
    gone = [
        f"# gone in 0.3: {MX}.{key} = {show(job.get(f'{MX}.{key}'))}: torchao's default is used"
        for key in ("recipe_name", "mxfp8_dim1_cast_kernel_choice")
    ]
    if not fqns:
        return [f"# no effect: {what} leaves no Linear", *gone]
    arguments = {"fqns": fqns, "model_compile_enabled": bool(compiled)}
    recipe.use(QUANTIZATION, "MXFP8LinearConverter")
    comment = f"{what}: 0.3 lists what is converted instead{_fused(given, names)}"
    return [*_convert("MXFP8LinearConverter", arguments, comment), *gone]


def _grouped(recipe: Recipe, job: Job, converter: str, compiled: bool) -> list[str]:
    fqns = job.get(f"{converter}.fqns")
    if not fqns:
        return [f"# no effect: {converter} with fqns = [] converted nothing"]
    name = "Float8GroupedExpertsConverter" if converter == GROUPED_FLOAT8 else "MXFP8GroupedExpertsConverter"
    recipe.use(QUANTIZATION, name)
    comment = f"{converter}: fqns = {show(fqns)}; 0.3 converts the experts of every layer"
    return _convert(name, {"model_compile_enabled": bool(compiled)}, comment)
