"""Warnings about float8, experts, compilation and the training loop: what runs, but not as its keys promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from titan_tune.domain.candidate import Value
from titan_tune.domain.settings import AcMode, CompileMode, Settings
from titan_tune.titan.rules.facts import (
    SM90,
    applies_fsdp,
    capability_text,
    checkpoints_per_op,
    has_capability,
)
from titan_tune.titan.rules.registry import Facts, warning

Values = Mapping[str, Value]

_MEASURED = "H200, torch 2.11, torchtitan 0.2.2"


# --- float8 --------------------------------------------------------------------------------------

FLOAT8_SMALL_DIM: Final = 2048
"""1B (dim 2048) gained 14 to 22 % tensorwise on an H200; smaller widths were not seen to gain."""


@warning(
    "float8-small-model",
    "float8 on dim={dim}: matrices this small spend more on casts than they save",
    fix="train small models in bf16 (remove quantize.linear.float8 from model.converters)",
)
def float8_small_model(settings: Settings, values: Values) -> Facts | None:
    """torchtitan issue #1191: float8 on the debug model was slower than bf16."""
    if settings.float8 is None or settings.model.dim >= FLOAT8_SMALL_DIM:
        return None
    return {"dim": settings.model.dim}


_LINEARS: Final = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)


@warning(
    "float8-filter",
    "quantize.linear.float8.filter_fqns={filters} leaves no layer in float8: entries match as substrings",
    fix='name whole layers, e.g. filter_fqns = ["output"]',
)
def float8_filter(settings: Settings, values: Values) -> Facts | None:
    """``module_filter_fn`` tests ``entry in fqn`` and skips dimensions that are not multiples of 16
    (torchtitan/components/quantization/utils.py); "Swapped to Float8Linear layers" is printed all the same.
    For the dense families, whose layer names are known."""
    float8, model = settings.float8, settings.model
    if float8 is None or model.moe is not None or model.mla is not None:
        return None
    filters = float8.filter_fqns
    if "output" in filters and len(filters) == 1:
        return None
    names = [f"layers.{layer}.{linear}" for layer in range(model.n_layers) for linear in _LINEARS]
    if any(not any(entry in name for entry in filters) for name in ("output", *names)):
        return None
    return {"filters": list(filters)}


@warning(
    "float8-all-gather-unsharded",
    "enable_fsdp_float8_all_gather with data_parallel_shard_degree=1 has no effect",
    fix="shard the parameters (data_parallel_shard_degree > 1), or switch it off",
)
def float8_all_gather_unsharded(settings: Settings, values: Values) -> Facts | None:
    """It is and-ed with ``dp_shard_enabled`` (torchtitan/components/quantization/float8.py)."""
    float8 = settings.float8
    if float8 is None or settings.dims.dp_shard > 1 or float8.recipe_named:
        return None
    return {} if values["quantize.linear.float8.enable_fsdp_float8_all_gather"] else None


@warning(
    "float8-emulate",
    "quantize.linear.float8.emulate computes float8 in higher precision: {problem}",
    fix="use it to test, not to train; set quantize.linear.float8.emulate = false on SM 8.9 and later",
)
def float8_emulate(settings: Settings, values: Values) -> Facts | None:
    """ "Not compatible with torch.compile", "for test purpose only" (torchtitan/config/job_config.py)."""
    float8 = settings.float8
    if float8 is None or not float8.emulate or settings.cluster.gpu.is_cpu:
        return None
    return {"problem": "not compatible with torch.compile" if settings.compile.model else "it is slow"}


@warning(
    "float8-eager",
    "{converter} without a compiled model: the casts are not fused and float8 is slower than bf16",
    fix="set compile.enable = true with model among compile.components",
)
def float8_eager(settings: Settings, values: Values) -> Facts | None:
    """ "The quantization modules are intended to be ran under `torch.compile` for competitive performance"
    (torchtitan/components/quantization/__init__.py)."""
    if settings.compile.model or settings.cluster.gpu.is_cpu:
        return None
    for present, converter in (
        (settings.float8 is not None and not settings.float8.emulate, "quantize.linear.float8"),
        (settings.mxfp8, "quantize.linear.mx"),
        (settings.grouped_float8, "quantize.grouped_mm.float8"),
        (settings.grouped_mxfp8, "quantize.grouped_mm.mx"),
    ):
        if present:
            return {"converter": converter}
    return None


@warning(
    "grouped-fqns",
    "{converter} with {converter}.fqns empty converts nothing",
    fix='set {converter}.fqns = ["experts"]',
)
def grouped_fqns(settings: Settings, values: Values) -> Facts | None:
    """The filters match modules by ``fqns`` (torchtitan/components/quantization/{float8,mx}.py)."""
    for present, converter in (
        (settings.grouped_float8, "quantize.grouped_mm.float8"),
        (settings.grouped_mxfp8, "quantize.grouped_mm.mx"),
    ):
        if present and not values[f"{converter}.fqns"]:
            return {"converter": converter}
    return None


@warning(
    "mxfp8-compile-checkpoint",
    "quantize.linear.mx with a compiled model and activation_checkpoint.mode={mode} has raised CheckpointError",
    fix='if it does, use activation_checkpoint.mode = "none"',
)
def mxfp8_compile_checkpoint(settings: Settings, values: Values) -> Facts | None:
    """torchtitan issue #1971."""
    if not (settings.mxfp8 or settings.grouped_mxfp8) or not settings.compile.model:
        return None
    mode = settings.ac.mode
    return None if mode in (AcMode.NONE, AcMode.MEMORY_BUDGET) else {"mode": mode.value}


# --- experts -------------------------------------------------------------------------------------


@warning(
    "grouped-mm",
    "{hardware} has no grouped matmul: the experts run one after the other in a loop",
    fix="use GPUs of SM 9.0 or later for mixture-of-experts models",
)
def grouped_mm(settings: Settings, values: Values) -> Facts | None:
    """ "Failed to use grouped mm, which is only supported on SM90 or later" (models/*/model/args.py)."""
    if settings.model.moe is None or has_capability(settings.cluster.gpu, SM90):
        return None
    return {"hardware": capability_text(settings.cluster.gpu)}


@warning(
    "expert-parallel-dense",
    "expert_parallel_degree={ep} has no effect: {model} {flavor} has no experts",
    fix="set parallelism.expert_parallel_degree = 1",
)
def expert_parallel_dense(settings: Settings, values: Values) -> Facts | None:
    """models/llama3/infra/parallelize.py never looks at it. Seen on CPU with torchtitan 0.2.2."""
    if settings.dims.ep == 1 or settings.model.moe is not None:
        return None
    return {"ep": settings.dims.ep, "model": settings.model.name, "flavor": settings.model.flavor}


@warning(
    "ep-compile-hang",
    "expert_parallel_degree={ep} with a compiled model has hung",
    fix="probe it with a timeout before a long run",
)
def ep_compile_hang(settings: Settings, values: Values) -> Facts | None:
    """torchtitan pull request #1649."""
    if settings.dims.ep == 1 or settings.model.moe is None or not settings.compile.model:
        return None
    return {"ep": settings.dims.ep}


@warning(
    "moe-recompute-routing",
    "activation_checkpoint.mode={mode} recomputes the routing: experts may be chosen differently in the backward and "
    "shapes then do not match",
    fix='if it fails, use activation_checkpoint.mode = "selective" with selective_ac_option = "op"',
)
def moe_recompute_routing(settings: Settings, values: Values) -> Facts | None:
    """torchtitan issue #1117."""
    if settings.model.moe is None or settings.ac.mode not in (AcMode.FULL, AcMode.SELECTIVE):
        return None
    return None if checkpoints_per_op(settings) else {"mode": settings.ac.mode.value}


# --- compile and memory --------------------------------------------------------------------------


@warning(
    "gpt-oss-compile",
    "compile.components has model, but gpt_oss compiles its loss only{consequence}",
    fix='expect eager speed and memory; set compile.components = ["loss"] to say so',
)
def gpt_oss_compile(settings: Settings, values: Values) -> Facts | None:
    """``parallelize_gptoss`` never calls torch.compile (models/gpt_oss/infra/parallelize.py). Seen on CPU."""
    if settings.model.name != "gpt_oss" or not settings.compile.model:
        return None
    budget = settings.ac.mode is AcMode.MEMORY_BUDGET
    return {"consequence": ", so activation_checkpoint.mode=memory_budget saves nothing" if budget else ""}


@warning(
    "attention-always-compiles",
    "{attention} attention is compiled with max-autotune even with compile off: the first step is slow",
    fix="leave time for it (comm.init_timeout_seconds), or use a flavor with sdpa attention",
)
def attention_always_compiles(settings: Settings, values: Values) -> Facts | None:
    """``FlexAttentionWrapper`` and ``VarlenAttentionWrapper`` compile themselves (torchtitan/models/attention.py)."""
    if settings.model.attention == "sdpa" or settings.compile.model:
        return None
    return {"attention": settings.model.attention}


@warning(
    "eager-op-checkpoint",
    'selective_ac_option="op" without a compiled model keeps more memory alive (50.3 against 33.6 GiB active for 1B; '
    + _MEASURED
    + ") and has run out of it through a reference cycle",
    fix='set compile.enable = true, or use activation_checkpoint.mode = "full"',
)
def eager_op_checkpoint(settings: Settings, values: Values) -> Facts | None:
    """pytorch issue #154642: eager per-op selective checkpointing ran an 8B model out of memory."""
    if settings.compile.model or settings.cluster.gpu.is_cpu:
        return None
    return {} if checkpoints_per_op(settings) else None


_AUTOTUNE: Final = (CompileMode.MAX_AUTOTUNE, CompileMode.MAX_AUTOTUNE_NO_CUDAGRAPHS)
COLD_COMPILE_SECONDS: Final = {"default": 300, "autotune": 900}
"""Default: torchtitan's own timeout. Autotuned: a cold compile of 639 s was reported (radixark/miles #3158)."""


@warning(
    "init-timeout",
    "comm.init_timeout_seconds={timeout} must cover the first step and its cold compilation (compile mode {mode})",
    fix="set comm.init_timeout_seconds = {needed}",
)
def init_timeout(settings: Settings, values: Values) -> Facts | None:
    """The timeout is lowered to comm.train_timeout_seconds only after step 1 (torchtitan/train.py)."""
    if settings.cluster.world_size == 1 or not settings.compile.model:
        return None
    needed = COLD_COMPILE_SECONDS["autotune" if settings.compile.mode in _AUTOTUNE else "default"]
    timeout = values["comm.init_timeout_seconds"]
    if timeout >= needed:
        return None
    return {"timeout": timeout, "mode": settings.compile.mode.value, "needed": needed}


# --- training loop -------------------------------------------------------------------------------


@warning(
    "early-step-clipping",
    "optimizer.early_step_in_backward makes clipping at training.max_norm a no-op{accumulation}",
    fix="set optimizer.early_step_in_backward = false",
    numerics=True,
)
def early_step_clipping(settings: Settings, values: Values) -> Facts | None:
    """The parameters are stepped before the norm is taken: grad_norm reads 0.0000 (seen on CPU). The hook fires on
    every backward, so each accumulation microbatch steps (``OptimizersInBackwardContainer``,
    torchtitan/components/optimizer.py)."""
    if not settings.early_step_in_backward:
        return None
    steps = settings.gradient_accumulation_steps
    accumulation = (
        f", and steps the optimizer at each of {steps} accumulation microbatches" if steps > 1 else ""
    )
    return {"accumulation": accumulation}


@warning(
    "hsdp-accumulation",
    "data_parallel_replicate_degree={dp_replicate} with {steps} accumulation microbatches all-reduces the gradients in "
    "each of them",
    fix="raise training.local_batch_size so that fewer microbatches are needed",
)
def hsdp_accumulation(settings: Settings, values: Values) -> Facts | None:
    """torchtitan issue #1929."""
    steps = settings.gradient_accumulation_steps
    if settings.dims.dp_replicate == 1 or steps == 1 or not applies_fsdp(settings):
        return None
    return {"dp_replicate": settings.dims.dp_replicate, "steps": steps}


@warning(
    "warmup-steps",
    "lr_scheduler.warmup_steps={warmup} exceeds the {total} steps of the schedule: the warm-up is compressed",
    fix="set lr_scheduler.total_steps to the length of the real run, or lower warmup_steps",
)
def warmup_steps(settings: Settings, values: Values) -> Facts | None:
    """ "Warmup steps (..) exceed total steps (..). Adjusting" (torchtitan/components/lr_scheduler.py)."""
    warmup, total = values["lr_scheduler.warmup_steps"], values["lr_scheduler.total_steps"]
    if total is None:
        total = values["training.steps"]
    return {"warmup": warmup, "total": total} if warmup > total else None


@warning(
    "sequence-over-range",
    "training.seq_len={seq_len} exceeds the {max_seq_len} positions {model} {flavor} was made for",
    fix="use a shorter training.seq_len, or a flavor with rotary scaling for it",
)
def sequence_over_range(settings: Settings, values: Values) -> Facts | None:
    """ "Sequence length .. exceeds original maximum .." (models/*/model/args.py)."""
    model = settings.model
    if settings.seq_len <= model.max_seq_len:
        return None
    return {
        "seq_len": settings.seq_len,
        "max_seq_len": model.max_seq_len,
        "model": model.name,
        "flavor": model.flavor,
    }


_KNOWN_PEAKS: Final = ("a100", "h100", "h200", "h20", "b200", "mi355x", "mi300x", "mi325x", "mi250x")


@warning(
    "mfu-peak",
    "torchtitan does not know the peak of {gpu}: the mfu it prints assumes an A100",
    fix="compare tokens/s, not mfu",
)
def mfu_peak(settings: Settings, values: Values) -> Facts | None:
    """ "Peak flops undefined for: .., fallback to A100" (``get_peak_flops``, torchtitan/tools/utils.py)."""
    gpu = settings.cluster.gpu
    name = gpu.name.lower()
    if gpu.is_cpu or any(known in name for known in _KNOWN_PEAKS):
        return None
    return {"gpu": gpu.name}
