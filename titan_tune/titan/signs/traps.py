"""Runs that work, but not as their configuration promises: what of it shows in several lines of a log.

Rule ids are those of ``titan_tune.titan.rules`` where a rule warns of the same before the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from titan_tune.titan.logs import LogLine, Milestone, ParsedLog
from titan_tune.titan.signs.facts import accumulation_steps, degrees, reported_steps
from titan_tune.titan.signs.finding import Diagnosis, Severity
from titan_tune.titan.signs.line_traps import line_traps

_FP32_COST: Final = {
    "tensor": "4,174 tokens/s per GPU against 52,924 with FSDP; H200, torch 2.11, torchtitan 0.2.2",
    "pipeline": "3,138 tokens/s per GPU against 52,924 with FSDP; H200, torch 2.11, torchtitan 0.2.2",
}


def precision_traps(log: ParsedLog) -> list[Diagnosis]:
    """fp32 by accident, and what plain data parallelism does."""
    dims = degrees(log)
    disabled = log.first(Milestone.MIXED_PRECISION, "is disabled")
    amp = log.first(Milestone.MIXED_PRECISION, "handled by AMP")
    if disabled is not None and log.config.get("training.dtype") != "bfloat16":
        unless = "" if log.config else " (unless training.dtype is bfloat16)"
        way = "pipeline" if dims.get("pp", 1) > 1 and dims.get("tp", 1) == 1 else "tensor"
        return [
            Diagnosis(
                f"fp32-{way}-parallel",
                Severity.WARNING,
                f"{way} parallelism without FSDP trains in fp32{unless}: no mixed precision applies "
                f"({_FP32_COST[way]})",
                'add FSDP (data_parallel_shard_degree > 1) beside it, or set training.dtype = "bfloat16" '
                "(changes the numerics)",
                disabled,
            )
        ]
    replicas = dims.get("dp_replicate", 1)
    if amp is None or replicas == 1:
        return []
    shard = f"shard instead: data_parallel_shard_degree = {replicas}, data_parallel_replicate_degree = 1"
    return [
        Diagnosis(
            "ddp-unsharded",
            Severity.WARNING,
            "data parallelism without sharding: every rank holds 16 bytes a parameter and an fp32 residual stream",
            shard,
            amp,
        ),
        Diagnosis(
            "ddp-gradient-division",
            Severity.WARNING,
            f"gradients are divided by the {replicas} replicas twice: the true grad_norm is {replicas} times the "
            "printed one",
            f"{shard}; or scale training.max_norm by 1/{replicas}",
            _grad_norm_line(log) or amp,
        ),
    ]


def pipeline_traps(log: ParsedLog) -> list[Diagnosis]:
    """The un-normalized loss of pipeline parallelism."""
    version = log.first(Milestone.VERSION)
    steps = reported_steps(log)
    if degrees(log).get("pp", 1) == 1 or not steps:
        return []
    if version is not None and not re.search(r"version: 0\.[012]\.", version.text):
        return []
    return [
        Diagnosis(
            "pp-unnormalized-loss",
            Severity.WARNING,
            f"pipeline parallelism back-propagates the loss summed over tokens: grad_norm {steps[0].grad_norm:g} is "
            "too large by the tokens of a step, and clipping hides it",
            "compare losses, not grad_norm, with runs without pipeline parallelism; torchtitan 0.3 repairs it",
            steps[0].line,
        )
    ]


def compile_traps(log: ParsedLog) -> list[Diagnosis]:
    """Compilation that was asked for and did not happen, or happened unasked."""
    initialized = log.first(Milestone.INITIALIZED)
    if initialized is None:
        return []
    compiled = log.first(Milestone.COMPILING)
    components = log.config.get("compile.components", ["model", "loss"])
    asked = log.config.get("compile.enable") is True and "model" in components
    loss_only = log.first(Milestone.COMPILING_LOSS) if not log.config else None
    if compiled is None and (asked or loss_only is not None):
        is_gpt_oss = _model_name(log) == "gpt_oss"
        return [
            Diagnosis(
                "gpt-oss-compile" if is_gpt_oss else "compile-not-applied",
                Severity.WARNING,
                "compile.enable is on, but no block was compiled: 'Compiling each TransformerBlock' is missing"
                + ("; gpt_oss compiles only the loss" if is_gpt_oss else ""),
                "count on eager speed and memory"
                if is_gpt_oss
                else 'put "model" among compile.components; if it is there, this model does not compile',
                loss_only or initialized,
            )
        ]
    attention = log.model_args.get("attn_type")
    if compiled is None and attention in ("flex", "varlen"):
        building = log.first(Milestone.BUILDING)
        message = f"{attention} attention compiles itself although compile is off: the first step includes it"
        return [Diagnosis("attention-always-compiles", Severity.NOTE, message, "", building)]
    return []


def float8_traps(log: ParsedLog) -> list[Diagnosis]:
    """Float8 that is on and does nothing, or less than it says."""
    active = log.first(Milestone.FLOAT8)
    if active is None:
        return []
    if log.float8_linear_modules == 0:
        return [_float8_unconverted(log, active)]
    checks = (_float8_unproven, _float8_eager, _float8_tensor_parallel, _float8_all_gather, _float8_small)
    return [found for check in checks if (found := check(log, active)) is not None]


def _float8_unconverted(log: ParsedLog, active: LogLine) -> Diagnosis:
    return Diagnosis(
        "float8-filter",
        Severity.WARNING,
        "float8 is on, but no layer was converted: this run is bf16",
        "shorten quantize.linear.float8.filter_fqns: entries match as substrings, and layers whose dimensions "
        "are no multiples of 16 are left out",
        log.first(Milestone.SWAPPED_FLOAT8) or active,
    )


def _float8_unproven(log: ParsedLog, active: LogLine) -> Diagnosis | None:
    if log.float8_linear_modules is not None:
        return None
    return Diagnosis(
        "float8-unproven",
        Severity.NOTE,
        "'Swapped to Float8Linear layers' is printed even where no layer matched",
        "count Float8Linear in the model that model.print_after_conversion = true prints",
        log.first(Milestone.SWAPPED_FLOAT8) or active,
    )


def _float8_eager(log: ParsedLog, active: LogLine) -> Diagnosis | None:
    if log.first(Milestone.COMPILING) is not None or log.first(Milestone.INITIALIZED) is None:
        return None
    return Diagnosis(
        "float8-eager",
        Severity.WARNING,
        "float8 without a compiled model: the casts are not fused, which is slower than bf16",
        'set compile.enable = true with "model" among compile.components',
        active,
    )


def _float8_tensor_parallel(log: ParsedLog, active: LogLine) -> Diagnosis | None:
    applied = log.first(Milestone.APPLIED, "Tensor Parallelism")
    if applied is None or "Float8 tensorwise" in applied.text:
        return None
    if "recipe rowwise" in active.text:
        return Diagnosis(
            "float8-rowwise-tensor-parallel",
            Severity.WARNING,
            "float8 rowwise with tensor parallelism has turned to NaN near step 80: a short run cannot clear it",
            "use tensorwise float8 with tensor parallelism, or watch the loss of a longer run",
            active,
        )
    return Diagnosis(
        "float8-tensor-parallel",
        Severity.WARNING,
        "float8 tensor parallelism did not apply: the all-gathers of tensor parallelism stay in bf16",
        "count on float8 matmuls only; torchtitan 0.2.2 cannot switch it on",
        applied,
    )


def _float8_all_gather(log: ParsedLog, active: LogLine) -> Diagnosis | None:
    swapped = log.first(Milestone.SWAPPED_FLOAT8, "enable_fsdp_float8_all_gather=False")
    if swapped is None or log.config.get("quantize.linear.float8.enable_fsdp_float8_all_gather") is not True:
        return None
    return Diagnosis(
        "float8-all-gather-unsharded",
        Severity.WARNING,
        "enable_fsdp_float8_all_gather had no effect: parameters are not sharded",
        "set data_parallel_shard_degree > 1, or switch it off",
        swapped,
    )


FLOAT8_SMALL_DIM: Final = 2048
"""Width from which float8 was seen to gain (1B: 14 to 22 % tensorwise; H200, torch 2.11, torchtitan 0.2.2)."""


def _float8_small(log: ParsedLog, active: LogLine) -> Diagnosis | None:
    dim = log.model_args.get("dim")
    if not isinstance(dim, int) or dim >= FLOAT8_SMALL_DIM:
        return None
    return Diagnosis(
        "float8-small-model",
        Severity.WARNING,
        f"float8 on dim = {dim}: matrices this small spend more on casts than they save",
        "train small models in bf16",
        active,
    )


def parallelism_traps(log: ParsedLog) -> list[Diagnosis]:
    """Async tensor parallelism, HSDP with accumulation, combinations that are reported to fail."""
    found = []
    dims = degrees(log)
    async_tp = log.first(Milestone.ASYNC_TP) or log.first(Milestone.APPLIED, "Async Tensor Parallelism")
    if async_tp is not None:
        found.append(
            Diagnosis(
                "async-tp-not-proven",
                Severity.NOTE,
                "async tensor parallelism is only a compiler flag: matmuls and collectives may stay unfused",
                "compare tokens/s with it off",
                async_tp,
            )
        )
    hsdp = log.first(Milestone.APPLIED, "HSDP")
    accumulation = accumulation_steps(log)
    if hsdp is not None and accumulation > 1:
        found.append(
            Diagnosis(
                "hsdp-accumulation",
                Severity.NOTE,
                f"HSDP all-reduces the gradients in each of the {accumulation} accumulation steps",
                "raise training.local_batch_size, or use FSDP, to communicate less",
                hsdp,
            )
        )
    if _model_name(log) == "qwen3" and dims.get("tp", 1) > 1 and dims.get("cp", 1) > 1:
        found.append(
            Diagnosis(
                "qwen3-tensor-context-parallel",
                Severity.NOTE,
                "qwen3 with tensor and context parallelism is reported to fail",
                "check the loss against a run with one of the two",
                log.first(Milestone.MESH),
            )
        )
    return found


TRAP_CHECKS: Final[tuple[Callable[[ParsedLog], list[Diagnosis]], ...]] = (
    precision_traps,
    pipeline_traps,
    compile_traps,
    float8_traps,
    parallelism_traps,
    line_traps,
)


def _model_name(log: ParsedLog) -> str:
    building = log.first(Milestone.BUILDING)
    return building.text.split()[1] if building else ""


def _grad_norm_line(log: ParsedLog) -> LogLine | None:
    steps = reported_steps(log)
    return steps[0].line if steps else None
