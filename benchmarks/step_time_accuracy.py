"""Refits the step-time constants on the H200 rows and writes reports/step_time_accuracy.md.

``python benchmarks/step_time_accuracy.py`` reports the constants in the code and what they predict
for a model that the fit did not see; ``--print-fit`` prints freshly fitted constants.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence

from h200_rows import ROOT, Row, rows

from titan_tune.estimate.step_time import CONSTANTS, Constants, estimate_step_time

FIXED = ("memory_efficiency", "optimizer_bytes", "compiled_dim_bytes", "compiled_ffn_bytes")
FREE = tuple(name for name in Constants._fields if name not in FIXED)
NEUTRAL_START = CONSTANTS._replace(
    matmul_efficiency=0.7,
    half_tokens=500.0,
    float8_tensorwise=0.6,
    float8_rowwise=0.45,
    float8_half_dim=500.0,
    float8_cast_bytes=6.0,
    float8_weight_bytes=20.0,
    attention_efficiency=0.45,
    eager_dim_bytes=90.0,
    eager_ffn_bytes=30.0,
    compiled_loss_bytes=12.0,
    eager_loss_bytes=26.0,
    compiled_launch=4e-4,
    eager_launch=1.2e-3,
    math_attention_passes=30.0,
    link_efficiency=0.6,
    exposed_fraction=0.6,
    tensor_parallel_exposed=2.0,
)
"""Guesses made before any fit: where the held-out fits begin."""
LARGE_ERROR = 0.5
ROUNDS = 60


def predicted(row: Row, constants: Constants) -> float:
    """Tokens/s per GPU; rows with a fake process group communicate nothing."""
    estimate = estimate_step_time(row.settings, constants)
    silent = estimate.components["communication"] if row.is_fake else 0.0
    return estimate.tokens_per_second_per_gpu * estimate.seconds / (estimate.seconds - silent)


def log_error(row: Row, constants: Constants) -> float:
    return math.log(predicted(row, constants) / row.tokens_per_second)


def fit(data: Sequence[Row], start: Constants = CONSTANTS) -> Constants:
    """Coordinate search on sum |log error|^1.5 (between absolute and squared), clipped."""

    def cost(constants: Constants) -> float:
        return sum(min(abs(log_error(row, constants)), LARGE_ERROR) ** 1.5 for row in data)

    return _coordinate_search(start, cost)


def _coordinate_search(start: Constants, cost: Callable[[Constants], float]) -> Constants:
    best, lowest, steps = start, cost(start), dict.fromkeys(FREE, 0.1)
    for _ in range(ROUNDS):
        for name in FREE:
            for sign in (1, -1):
                trial = best._replace(**{name: getattr(best, name) * (1 + sign * steps[name])})
                value = cost(trial)
                if value < lowest:
                    best, lowest = trial, value
                    steps[name] *= 1.2
                    break
            else:
                steps[name] *= 0.6
    return best


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rho; no ties worth minding."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        result = [0.0] * len(values)
        for rank, index in enumerate(order):
            result[index] = float(rank)
        return result

    first, second = ranks([a for a, _ in pairs]), ranks([b for _, b in pairs])
    return statistics.correlation(first, second)


def summary(errors: Sequence[float]) -> str:
    sizes = sorted(abs(math.expm1(error)) for error in errors)
    return (
        f"median {100 * statistics.median(sizes):.1f} %, 90th percentile "
        f"{100 * sizes[math.ceil(0.9 * len(sizes)) - 1]:.1f} %, worst {100 * sizes[-1]:.1f} %"
    )


def held_out_errors(data: Sequence[Row]) -> dict[str, list[float]]:
    """Errors on each model's rows with constants fitted on the other models, from neutral starts."""
    result = {}
    for flavor in sorted({row.settings.model.flavor for row in data}):
        kept = [row for row in data if row.settings.model.flavor != flavor]
        left_out = [row for row in data if row.settings.model.flavor == flavor]
        constants = fit(kept, NEUTRAL_START)
        result[flavor] = [log_error(row, constants) for row in left_out]
    return result


def report(data: Sequence[Row]) -> str:
    errors = [log_error(row, CONSTANTS) for row in data]
    one_gpu_1b = [
        (predicted(row, CONSTANTS), row.tokens_per_second)
        for row in data
        if row.settings.model.flavor == "1B" and row.settings.dims.world_size == 1
    ]
    same_job = [
        (predicted(row, CONSTANTS), row.tokens_per_second)
        for row in data
        if row.id.startswith("1B-b4-s4096") and row.settings.dims.world_size == 1
    ]
    held_out = held_out_errors(data)
    lines = [
        "# Step time: predicted against measured",
        "",
        f"{len(data)} runs on NVIDIA H200 (torch 2.11.0+cu130, torchtitan 0.2.2, torchao 0.17.0), one run each;",
        "one configuration repeats within about 3 %. Written by benchmarks/step_time_accuracy.py.",
        "",
        f"- all rows, constants fitted on them: {summary(errors)}",
        f"- rank correlation (Spearman), 1B on one GPU, {len(one_gpu_1b)} rows: {rank_correlation(one_gpu_1b):.3f}",
        f"- the same with one batch and sequence length ({len(same_job)} rows): {rank_correlation(same_job):.3f}",
        f"- models left out of the fit, all together: {summary([e for es in held_out.values() for e in es])}",
        "",
        "| model left out | rows | error |",
        "|---|---|---|",
        *(f"| {flavor} | {len(e)} | {summary(e)} |" for flavor, e in held_out.items()),
        "",
        "The 1B rows carry nearly all that is known of float8, TP, PP, DDP and eager speed: the fit without",
        "them says little. Nothing here was measured beyond two GPUs or across nodes.",
        "",
        "| run | measured tokens/s/GPU | predicted | error % | largest parts (ms) |",
        "|---|---|---|---|---|",
    ]
    for row, error in zip(data, errors, strict=True):
        parts = estimate_step_time(row.settings).components
        largest = sorted(parts.items(), key=lambda item: -item[1])[:4]
        shown = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in largest)
        lines.append(
            f"| {row.id} | {row.tokens_per_second:.0f} | {predicted(row, CONSTANTS):.0f} "
            f"| {100 * math.expm1(error):+.1f} | {shown} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    data = rows()
    if "--print-fit" in sys.argv:
        print(fit(data))
        return
    path = ROOT / "reports" / "step_time_accuracy.md"
    path.write_text(report(data))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
