"""Traps that one line of a log shows: a table.

Rule ids are those of ``titan_tune.titan.rules`` where a rule warns of the same before the run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from titan_tune.titan.logs import ParsedLog
from titan_tune.titan.signs.finding import Diagnosis, Severity


@dataclass(frozen=True, slots=True)
class LineTrap:
    """A text that by itself says what is wrong; the templates take the named groups of ``pattern``."""

    rule: str
    severity: Severity
    pattern: re.Pattern[str]
    message: str
    fix: str


def _line(rule: str, severity: Severity, pattern: str, message: str, fix: str) -> LineTrap:
    return LineTrap(rule, severity, re.compile(pattern), message, fix)


LINE_TRAPS: Final = (
    _line(
        "float8-not-applied",
        Severity.WARNING,
        r"Failed to swap to Float8Linear with recipe lookup",
        "torchao is too old for quantize.linear.float8.recipe_name: this run is bf16",
        "install torchao 0.17.0, or leave recipe_name out",
    ),
    _line(
        "float8-auto-filter",
        Severity.WARNING,
        r"Using default module_filter_fn for float8 model conversion",
        "auto_filter_small_kn needs a newer torchao: small layers were converted too and may be slower",
        "install torchao 0.17.0, or name the layers in filter_fqns",
    ),
    _line(
        "float8-eager",
        Severity.WARNING,
        r"Compile is required for high performance float8 MoE|torch\.compile enablement is required for highest "
        r"performance of MXFP8",
        "quantized experts without a compiled model are slow",
        'set compile.enable = true with "model" among compile.components',
    ),
    _line(
        "grouped-mm",
        Severity.WARNING,
        r"Failed to use grouped mm",
        "no grouped matmul before compute capability 9.0: the experts run one after the other",
        "expect a fraction of the speed; use a GPU of compute capability 9.0 or later",
    ),
    _line(
        "pp-bubble",
        Severity.WARNING,
        r"Number of microbatches \((?P<count>\d+)\) is less than the total number of stages \((?P<stages>\d+)\)",
        "{count} microbatch(es) for {stages} pipeline stages: the pipeline idles for much of the step",
        "raise training.local_batch_size, or lower pipeline_parallel_microbatch_size, to get at least {stages}",
    ),
    _line(
        "recompile-limit",
        Severity.WARNING,
        r"torch\._dynamo hit config\.\w*recompile_limit|hit config\.cache_size_limit",
        "torch.compile gave up on a function after too many recompilations: it runs eagerly from there on",
        "TORCH_LOGS=recompiles names the guard that failed; keep shapes static",
    ),
    _line(
        "async-tp-not-fused",
        Severity.WARNING,
        r"no producer matmul found.*skipping",
        "async tensor parallelism did not fuse a matmul with its collective",
        "compare tokens/s with enable_async_tensor_parallel off",
    ),
    _line(
        "sequence-over-range",
        Severity.WARNING,
        r"Sequence length (?P<seq_len>\d+) exceeds original maximum (?P<maximum>\d+)",
        "training.seq_len = {seq_len} is past the {maximum} positions that the model's RoPE is made for",
        "choose a flavor with a larger max_seq_len, or a shorter training.seq_len",
    ),
    _line(
        "pp-loss-not-visible",
        Severity.NOTE,
        r"Pipeline Parallel loss is not visible\. Please add rank (?P<rank>\d+)",
        "the printed loss is -1 except on rank {rank}, the last stage",
        "LOG_RANK={rank} (run_train.sh), or torchrun --local-ranks-filter, shows it",
    ),
    _line(
        "warmup-steps",
        Severity.NOTE,
        r"Warmup steps \((?P<warmup>\d+)\) exceed total steps \((?P<steps>\d+)\)",
        "the warm-up of {warmup} steps was squeezed into {steps}: divergence here says nothing about the real run",
        "set lr_scheduler.warmup_steps below training.steps",
    ),
    _line(
        "mfu-peak",
        Severity.NOTE,
        r"Peak flops undefined for: (?!CPU)(?P<device>.*), fallback to A100",
        "torchtitan does not know {device}: the printed mfu is relative to an A100",
        "compare tps, not mfu",
    ),
    _line(
        "out-of-data",
        Severity.WARNING,
        r"Ran out of data; last step was canceled",
        "the dataset ended before training.steps",
        "lower training.steps, or use a larger dataset",
    ),
    _line(
        "dataset-relooped",
        Severity.NOTE,
        r"Dataset (?P<name>\S+) is being re-looped",
        "the dataset {name} started again from its beginning",
        "use a larger dataset when the loss matters",
    ),
    _line(
        "old-torch",
        Severity.WARNING,
        r"Detected that the pytorch version (?P<version>\S+) is older than (?P<needed>\S+?)\. ",
        "torch {version} is older than a feature of this job needs ({needed})",
        "upgrade torch",
    ),
    _line(
        "deterministic",
        Severity.NOTE,
        r"Deterministic algorithm enabled",
        "deterministic algorithms are slower: this is not the speed of the real run",
        "switch debug.deterministic off to measure",
    ),
    _line(
        "profiling",
        Severity.NOTE,
        r"(?:Profiling active|Memory profiler active)\.",
        "the profiler was on: steps it records are slower",
        "switch [profiling] off to measure",
    ),
)


def line_traps(log: ParsedLog) -> list[Diagnosis]:
    """The traps that one line shows; each is told once."""
    found = []
    shows_loss = any(step.has_loss for step in log.steps)
    for trap in LINE_TRAPS:
        if trap.rule == "pp-loss-not-visible" and (shows_loss or not log.steps):
            continue
        line = log.find(trap.pattern)
        match = trap.pattern.search(line.text) if line else None
        if line is None or match is None:
            continue
        groups = match.groupdict()
        found.append(
            Diagnosis(
                trap.rule, trap.severity, trap.message.format_map(groups), trap.fix.format_map(groups), line
            )
        )
    return found
