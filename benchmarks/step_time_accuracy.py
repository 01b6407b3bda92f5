"""Refits the step-time constants on the H200 rows and tables and writes reports/step_time_accuracy.md.

``python benchmarks/step_time_accuracy.py`` reports the constants in the code and what they predict
for a model that the fit did not see; ``--print-fit`` prints freshly fitted constants.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from h200_rows import ROOT, Row, real_pair_rows, rows

from titan_tune.calibrate.rates import rates_of
from titan_tune.calibrate.result import Calibration
from titan_tune.estimate.step_time import CONSTANTS, INTERVAL, Constants, estimate_step_time
from titan_tune.space.file import load_space
from titan_tune.titan.settings import settings_from

FIXED = ("memory_efficiency", "optimizer_bytes", "compiled_residuals", "compiled_dims", "compiled_ffns")
CALIBRATED = ("calibrated_overlapped", "calibrated_waited", "calibrated_tensor_parallel")
"""Fitted last, on the same runs with the links as a calibration measured them."""
FREE = tuple(name for name in Constants._fields if name not in (*FIXED, *CALIBRATED))
PRIOR = CONSTANTS._replace(
    matmul_efficiency=0.72,
    tile_elements=3e5,
    reduction=100.0,
    fp32_efficiency=0.8,
    float8_tensorwise=0.7,
    float8_rowwise=0.65,
    float8_reduction=400.0,
    float8_cast_bytes=7.0,
    float8_weight_casts=2.0,
    rowwise_casts=2.0,
    eager_float8_casts=8.0,
    attention_efficiency=0.5,
    eager_residuals=18.0,
    eager_dims=27.0,
    eager_ffns=20.0,
    compiled_loss_bytes=16.0,
    eager_loss_bytes=40.0,
    compiled_launch=1.5e-4,
    eager_launch=3e-4,
    compiled_host=2.5e-3,
    eager_host=5e-3,
    eager_tp_host=12e-3,
    eager_cp_host=6e-3,
    eager_op_host=1.6,
    expert_host=15e-3,
    recomputed_host=1 / 3,
    compiled_float8_host=2e-3,
    eager_float8_host=14e-3,
    fsdp_host=2e-3,
    float8_gather_host=6e-3,
    step_seconds=2e-3,
    math_attention_passes=16.0,
    overlapped_exposed=1.0,
    tensor_parallel_exposed=1.0,
    calibrated_overlapped=1.0,
    calibrated_waited=1.0,
    calibrated_tensor_parallel=1.0,
)
"""What counting and data sheets suggest: where fits begin, and what constants stay near that rows say little about."""
PRIOR_WIDTH = 0.4
"""Standard deviation of a constant's logarithm."""
NOISE = 0.03
"""How well one configuration's speed repeats."""
TABLE_WEIGHT = 0.35
"""Of a table's row: its neighbours on the host make it noisier."""
TABLES = ROOT / "tests" / "data" / "tables"
CALIBRATION = ROOT / "tests" / "data" / "h200_calibration.json"
TABLES_NOTE = """\
two runs of one configuration differed by 0.3 to 1.8 % on one machine (four of them), by up to 1 % between
machines (three compiled ones) and by 6 % (an eager one).
Tables are many configurations of one job: four at a time on one host with one GPU each, two at a time
with two (its eager rows and its baseline later, alone), one at a time for 3B. Only a table's ratios count:
its median error is taken out (shown as offset). The one-GPU table lies 13 % below what the single runs
imply. Sharing the host is a part of it: a later search measured four of its configurations 1 to 9 %
faster, still 8 to 13 % below the prediction; why was not found out. Written by
benchmarks/step_time_accuracy.py."""
READING = """\
The 1B rows carry nearly all that is known of float8, TP, PP, CP, DDP and eager float8, and all of eager
TP, CP and PP: a fit without them has the prior for it. The one row of experts (16B, cut to 6 layers, eager)
sets a constant of its own, so only its left-out figure says something. Without the 8B rows most of them
are predicted 4 to 5 % too slow: what FSDP's communication adds is fitted on small blocks then. Terms
and priors were chosen with all of these rows in sight, so the left-out figures flatter. Nothing was
measured beyond two GPUs or across nodes.

Blind tests, each with the constants as they were before the rows had any part in the model, no offset
taken out:

| rows | predicted by | error | rank correlation |
|---|---|---|---|
| 28 compiled ones of the 1B two-GPU table | first version | median 2.8 %, 90th percentile 8.9 %, worst 11.0 % | 0.941 |
| 12 of the 3B two-GPU table | second | median 1.4 %, 90th percentile 3.5 %, worst 5.4 % | 0.944 |
| 14 single two-GPU runs of 1B, 3B and 8B | second | median 2.3 %, 90th percentile 4.6 %, worst 5.6 % | 0.965 |
| 14 eager ones of the 1B two-GPU table | second | median 4.6 %, 90th percentile 28.5 %, worst 36.4 % | 0.837 |
| 1 of experts | second | 130 % too fast | |

What failed were layouts that no eager row had shown: TP (36 % too fast, every operator of a DTensor costs
the host), CP (12 %), PP (20 % too slow) and experts. The third version has host terms for them, the reductions
of float8 scales under TP (counted by a dry run), a cost of each optimizer step in place of most of that of each
block, fp32 residuals of eager blocks under autocast, and rowwise float8 whose casts are dear rather than
its products. With the links of a calibration the second version erred more (3B table: median 4.8 %, worst 13.4 %):
its shares of exposed communication belonged to the catalogue's rate, and two H200s move 240 GB/s instead of 360.
Calibrated links have shares of their own now, fitted on these runs.

What stays wrong: full AC under TP, eager, 12 % too fast; PP, eager, 8 to 11 % too slow; full AC under CP,
compiled, 12 % too fast without float8 and 5 % with it; float8 rowwise under FSDP on 1B, 9 % too fast, one run;
`selective-op, default, tensorwise, 4` of the one-GPU table, 17 % too fast, measured 15 % below the same with CUDA
graphs where other rows are within 4 %. No term was added for single dense rows."""
LARGE_ERROR = 0.5
ROUNDS = 60


@cache
def runs() -> tuple[Row, ...]:
    """Single runs: the H200 rows, and the real two-GPU runs that dry runs are compared with."""
    return rows() + real_pair_rows()


def predicted(row: Row, constants: Constants) -> float:
    """Tokens/s per GPU; rows with a fake process group communicate nothing."""
    estimate = estimate_step_time(row.settings, constants)
    silent = estimate.components["communication"] if row.is_fake else 0.0
    return estimate.tokens_per_second_per_gpu * estimate.seconds / (estimate.seconds - silent)


def log_error(row: Row, constants: Constants) -> float:
    return math.log(predicted(row, constants) / row.tokens_per_second)


@dataclass(frozen=True)
class Table:
    """Many configurations of one job, measured side by side: jobs that share a host slow each other, so that only
    their order and ratios count. ``offset`` takes the rest out."""

    name: str
    rows: tuple[Row, ...]

    @property
    def flavor(self) -> str:
        """The model's."""
        return self.rows[0].settings.model.flavor

    def errors(self, constants: Constants) -> list[float]:
        """Log errors beyond the table's own median."""
        found = [log_error(row, constants) for row in self.rows]
        middle = statistics.median(found)
        return [error - middle for error in found]


@cache
def tables() -> tuple[Table, ...]:
    """The measured tables of benchmarks/measure_table.py."""
    return tuple(_table(path) for path in sorted(TABLES.glob("*.jsonl")))


def _table(path: Path) -> Table:
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    space = load_space(ROOT / head["space"])
    base = space.base.resolved()
    return Table(
        path.stem,
        tuple(
            Row(
                id=", ".join(map(str, line["choices"].values())),
                settings=settings_from({**base, **line["values"]}, space.base.model, space.cluster),
                active_gib=(),
                reserved_gib=(),
                device_gib=(),
                tokens_per_second=line["tokens_per_second_per_gpu"],
                is_fake=False,
            )
            for line in lines
            if line["status"] == "completed"
        ),
    )


def total(errors: Sequence[float]) -> float:
    """What a fit pays for errors: |log error|^1.5 against the noise, clipped."""
    return sum((min(abs(error), LARGE_ERROR) / NOISE) ** 1.5 for error in errors)


def fit(data: Sequence[Row], beside: Sequence[Table], start: Constants = PRIOR) -> Constants:
    """The likeliest constants: the errors and the prior."""

    def cost(constants: Constants) -> float:
        strayed = (getattr(constants, name) / getattr(PRIOR, name) for name in FREE)
        return (
            total([log_error(row, constants) for row in data])
            + TABLE_WEIGHT * sum(total(table.errors(constants)) for table in beside)
            + sum((math.log(ratio) / PRIOR_WIDTH) ** 2 for ratio in strayed)
        )

    found = _coordinate_search(start, cost, FREE)
    linked = [row for row in calibrated([*data, *_rows_of(beside)]) if row.settings.dims.world_size > 1]

    def cost_of_links(constants: Constants) -> float:
        return total([log_error(row, constants) for row in linked if not row.is_fake])

    return _coordinate_search(found, cost_of_links, CALIBRATED)


def _rows_of(beside: Iterable[Table]) -> Iterator[Row]:
    for table in beside:
        yield from table.rows


def calibrated(data: Iterable[Row]) -> list[Row]:
    """The rows with the rates that a calibration of two H200s measured."""
    rates = rates_of(Calibration.model_validate_json(CALIBRATION.read_text(encoding="utf-8")))
    return [
        replace(
            row,
            settings=replace(row.settings, cluster=row.settings.cluster.model_copy(update={"rates": rates})),
        )
        for row in data
    ]


def _coordinate_search(
    start: Constants, cost: Callable[[Constants], float], names: Sequence[str]
) -> Constants:
    best, lowest, steps = start, cost(start), dict.fromkeys(names, 0.1)
    for _ in range(ROUNDS):
        for name in names:
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
    """Spearman's rho; equal values share the mean of their ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]

    first, second = ranks([a for a, _ in pairs]), ranks([b for _, b in pairs])
    return statistics.correlation(first, second)


def within(errors: Iterable[float]) -> str:
    """How many speeds lie in the interval of measured GPUs."""
    found = [INTERVAL[0] <= math.exp(-error) <= INTERVAL[1] for error in errors]
    return f"{sum(found)} of {len(found)}"


def summary(errors: Sequence[float]) -> str:
    sizes = sorted(abs(math.expm1(error)) for error in errors)
    return (
        f"median {100 * statistics.median(sizes):.1f} %, 90th percentile "
        f"{100 * sizes[math.ceil(0.9 * len(sizes)) - 1]:.1f} %, worst {100 * sizes[-1]:.1f} %"
    )


@dataclass(frozen=True)
class HeldOut:
    """Rows and tables of one model under constants fitted without it."""

    flavor: str
    errors: tuple[float, ...]
    correlation: float
    tables: tuple[tuple[str, tuple[float, ...], float], ...] = ()
    """Name, errors beyond the median, rank correlation."""


def held_out(data: Sequence[Row]) -> Iterator[HeldOut]:
    """Fits on the other models, begun at the prior."""
    for flavor in _flavors(data):
        kept = [row for row in data if row.settings.model.flavor != flavor]
        left_out = [row for row in data if row.settings.model.flavor == flavor]
        constants = fit(kept, [table for table in tables() if table.flavor != flavor])
        yield HeldOut(
            flavor,
            tuple(log_error(row, constants) for row in left_out),
            correlation_of(left_out, constants),
            tuple(
                (table.name, tuple(table.errors(constants)), correlation_of(table.rows, constants))
                for table in tables()
                if table.flavor == flavor
            ),
        )


def correlation_of(data: Sequence[Row], constants: Constants) -> float:
    """Rank correlation of predicted and measured speeds; not a number for a single row."""
    if len(data) < 2:
        return math.nan
    return rank_correlation([(predicted(row, constants), row.tokens_per_second) for row in data])


def shown(correlation: float) -> str:
    """A rank correlation, of one row nothing."""
    return "" if math.isnan(correlation) else f"{correlation:.3f}"


def report(data: Sequence[Row]) -> str:
    errors = [log_error(row, CONSTANTS) for row in data]
    found = list(held_out(data))
    left_out = [error for one in found for error in one.errors]
    lines = [
        "# Step time: predicted against measured",
        "",
        f"{len(data)} runs on NVIDIA H200 (torch 2.11.0+cu130, torchtitan 0.2.2, torchao 0.17.0), one run each;",
        *TABLES_NOTE.splitlines(),
        "",
        f"- all rows, constants fitted on them and the tables: {summary(errors)}",
        f"- models left out of the fit, all together: {summary(left_out)}; {within(left_out)} within the interval",
        f"  that an estimate gives ({INTERVAL[0]} to {INTERVAL[1]} of the prediction)",
        "",
        "With the constants in the code, which is what a user gets:",
        "",
        "| model | rows | error | rank correlation |",
        "|---|---|---|---|",
        *_model_lines(data),
        "",
        "With constants fitted on the other models only:",
        "",
        "| model left out | rows | error | rank correlation |",
        "|---|---|---|---|",
    ]
    for one in found:
        lines.append(
            f"| {one.flavor} | {len(one.errors)} | {summary(one.errors)} | {shown(one.correlation)} |"
        )
        for name, beyond, correlation in one.tables:
            lines.append(
                f"| {one.flavor}, table {name} | {len(beyond)} | {summary(beyond)} | {correlation:.3f} |"
            )
    lines += [
        "",
        *_link_lines(data),
        "",
        *READING.splitlines(),
        "",
        "| table | rows | offset | error beyond it | rank correlation |",
        "|---|---|---|---|---|",
    ]
    for table in tables():
        offset = statistics.median(log_error(row, CONSTANTS) for row in table.rows)
        lines.append(
            f"| {table.name} | {len(table.rows)} | {100 * math.expm1(offset):+.1f} % "
            f"| {summary(table.errors(CONSTANTS))} | {correlation_of(table.rows, CONSTANTS):.3f} |"
        )
    lines += ["", *_row_lines("run", data, errors)]
    for table in tables():
        lines += [
            "",
            *_row_lines(f"table {table.name}, offset taken out", table.rows, table.errors(CONSTANTS)),
        ]
    return "\n".join([*lines, ""])


def _model_lines(data: Sequence[Row]) -> Iterator[str]:
    for flavor in _flavors(data):
        mine = [row for row in data if row.settings.model.flavor == flavor]
        errors = summary([log_error(row, CONSTANTS) for row in mine])
        yield f"| {flavor} | {len(mine)} | {errors} | {shown(correlation_of(mine, CONSTANTS))} |"


def _link_lines(data: Sequence[Row]) -> Iterator[str]:
    """What a calibration's links change."""
    pairs = [
        row for row in [*data, *_rows_of(tables())] if row.settings.dims.world_size == 2 and not row.is_fake
    ]
    yield "Real runs on two GPUs, tables among them, by what the links are taken to do:"
    yield ""
    yield "| links | rows | error | rank correlation |"
    yield "|---|---|---|---|"
    for name, found in (("catalogue", pairs), ("calibrated on the machine", calibrated(pairs))):
        errors = summary([log_error(row, CONSTANTS) for row in found])
        yield f"| {name} | {len(found)} | {errors} | {correlation_of(found, CONSTANTS):.3f} |"


def _flavors(data: Sequence[Row]) -> list[str]:
    return sorted({row.settings.model.flavor for row in data})


def _row_lines(title: str, data: Sequence[Row], errors: Sequence[float]) -> Iterator[str]:
    yield f"| {title} | measured tokens/s/GPU | predicted | error % | largest parts (ms) |"
    yield "|---|---|---|---|---|"
    for row, error in zip(data, errors, strict=True):
        parts = estimate_step_time(row.settings).components
        largest = sorted(parts.items(), key=lambda item: -item[1])[:4]
        shown = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in largest)
        yield (
            f"| {row.id} | {row.tokens_per_second:.0f} | {predicted(row, CONSTANTS):.0f} "
            f"| {100 * math.expm1(error):+.1f} | {shown} |"
        )


def main() -> None:
    data = runs()
    if "--print-fit" in sys.argv:
        print(fit(data, tables()))
        return
    path = ROOT / "reports" / "step_time_accuracy.md"
    path.write_text(report(data))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
