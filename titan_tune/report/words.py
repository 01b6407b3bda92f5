"""The sentences of a report, the same in every format. Plain text: whoever writes a page escapes it.

Every figure says where it is from: measured (by a probe), from a dry run, predicted (by formula) or computed (from
those).
"""

from __future__ import annotations

import math

from titan_tune.domain.probe import Origin
from titan_tune.report.answer import Answer, Memory
from titan_tune.report.data import ReportData
from titan_tune.report.dry_runs import stated_interval
from titan_tune.report.sources import noun

NO_LEAN = 0.0005
"""A bias that rounds to 0.0 %."""


def tokens(value: float) -> str:
    """Tokens per second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def percent(fraction: float) -> str:
    """A signed percentage."""
    return f"{100 * fraction:+.1f} %".replace("-", "−")


def share(fraction: float) -> str:
    """An unsigned percentage."""
    return f"{100 * fraction:.1f} %"


def gib_change(value: float) -> str:
    """A signed difference of memory."""
    return f"{value:+.1f} GiB".replace("-", "−")


def hours(value: float) -> str:
    """Hours with as many digits as they deserve; two that count below 0.01."""
    if 0.0 < value < 0.01:
        return f"{value:.{1 - math.floor(math.log10(value))}f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def plural(count: int, noun: str) -> str:
    """``1 probe``, ``3 probes``, ``2 processes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def effects_sentence(data: ReportData) -> str:
    """What the table of effects shows, or why there is none."""
    configurations = "configurations" if data.has_dry_runs else "measured configurations"
    if not data.effects:
        return f"No two {configurations} differ in only one axis, so no effect can be stated."
    apart = " Dry runs are paired with dry runs alone." if data.has_dry_runs and not data.all_dry_runs else ""
    return (
        f"Median change of throughput over pairs of {configurations} that differ only in that axis; the range spans"
        f" all pairs. One pair is one observation, not a rule.{apart}"
    )


def unit(data: ReportData) -> str:
    """The unit of throughput."""
    return f"tokens/s per {data.worker}"


def hour_unit(data: ReportData) -> str:
    """The unit of cost."""
    return f"{data.worker}-hours"


def minute_unit(data: ReportData) -> str:
    """The unit of the progress axis."""
    return f"{data.worker}-minutes"


def headline(data: ReportData) -> str:
    """The result in one sentence."""
    found = data.answer
    if found is None:
        return no_winner(data)
    speed = f"{tokens(found.tokens_per_second)} {unit(data)}"
    if found.gain_origin is Origin.DRY_RUN:
        return _dry_headline(data, found, speed)
    if found.gain is None:
        return f"The best measured configuration reaches {speed}; the job as it was has no measurement to compare."
    if found.is_baseline and data.coverage.measured == 1:
        return f"Only the job as it was has been measured: {speed}."
    if found.is_baseline:
        return f"Nothing that was measured beats the job as it was ({speed})."
    if found.gain <= 0.0:
        return f"The best of the finals reaches {speed}, which is not faster than the job as it was: keep the job."
    if found.gain_is_certain:
        return f"The best measured configuration trains {share(found.gain)} faster than the job as it was: {speed}."
    return (
        f"The best measured configuration reaches {speed}, {percent(found.gain)} over the job as it was,"
        " but the intervals overlap: the two cannot be told apart."
    )


def _dry_headline(data: ReportData, found: Answer, speed: str) -> str:
    """The result where a side of the comparison, or both, is a dry run."""
    dry = found.origin is Origin.DRY_RUN
    reaches = f"the best configuration reaches {speed}"
    if found.gain is None:
        return f"A dry run predicts that {reaches}; there is no figure for the job as it was to compare."
    if found.is_baseline and data.coverage.measured == 1:
        return f"Only the job as it was had a dry run, which predicts {speed}."
    if found.is_baseline:
        return f"Dry runs predict that nothing that was tried beats the job as it was ({speed})."
    if found.baseline_origin is not found.origin:
        other = "was measured" if dry else "had a dry run alone"
        first = (
            f"A dry run predicts that {reaches}"
            if dry
            else f"The best configuration reaches {speed}, measured"
        )
        return f"{first}, {percent(found.gain)} over the job as it was, which {other}."
    if found.gain <= 0.0:
        return f"Dry runs predict {speed} for the best of the finals, not faster than the job as it was: keep the job."
    if found.gain_is_certain:
        return (
            f"Dry runs predict that the best configuration trains {share(found.gain)} faster than the job as it was:"
            f" {speed}."
        )
    return (
        f"Dry runs predict that {reaches}, {percent(found.gain)} over the job as it was,"
        " but the intervals overlap: the two cannot be told apart."
    )


def no_winner(data: ReportData) -> str:
    """Why there is no best configuration."""
    if not data.trials:
        return "There is no result: no probe has finished."
    if data.all_dry_runs:
        return f"There is no result: of {plural(len(data.trials), 'dry run')} none gave a throughput."
    if len(data.trials) == 1:
        return "There is no result: the only probe was not measured."
    return f"There is no result: none of {len(data.trials)} probes was measured."


def gain_sentence(data: ReportData, found: Answer) -> str:
    """The gain with its interval, and what it is over."""
    if found.gain is None or found.gain_interval is None or found.baseline_tokens_per_second is None:
        failed = data.baseline_failed
        why = f" (it ended as {failed.status}: {failed.message})" if failed else ""
        missing = "was not measured"
        if data.has_dry_runs:
            missing = "has no dry run that gave a throughput" if data.all_dry_runs else "has no throughput"
        return f"No gain is stated: the job as it was {missing}{why}."
    if found.is_baseline:
        alone = data.coverage.measured == 1
        return "There is nothing to compare it with." if alone else "The job as it was is the best: keep it."
    low, high = found.gain_interval
    base = f"{tokens(found.baseline_tokens_per_second)} {unit(data)}"
    interval, warning = "95 % interval", ""
    if found.gain_origin is Origin.DRY_RUN:
        interval = "interval"
        both = found.origin is found.baseline_origin
        which = "both throughputs are" if both else "one throughput is"
        warning = f" This gain is a prediction: {which} from dry runs."
    return (
        f"Gain {percent(found.gain)}, between {percent(low)} and {percent(high)}, over the job as it was"
        f" ({base}, {found.baseline_origin}). The bounds pair the worst end of one {interval} with the best end of the"
        f" other.{warning}"
    )


def interval_note(found: Answer) -> str:
    """What a winner's interval is, where a dry run states it."""
    if found.origin is not Origin.DRY_RUN:
        return ""
    low, high = found.interval
    width = (high - low) / 2.0 / found.tokens_per_second
    return f"The interval is {stated_interval((width, width))}."


def runs_sentence(found: Answer) -> str:
    """How often the winner ran, and which runs count."""
    run = "dry run" if found.origin is Origin.DRY_RUN else "run"
    if found.final:
        return (
            f"{plural(found.runs, run)}, {found.counted_runs} of them in the finals, which alone count:"
            " there the best configurations and the job as it was ran again, in turn."
        )
    return f"{plural(found.runs, run)}; there were no finals to confirm it."


def memory_sentence(data: ReportData, memory: Memory) -> str:
    """Peak memory, by kind."""
    if memory.kind == "rss":
        return f"{memory.active_gib:.2f} GiB resident set size of the largest process (measured)."
    capacity = data.method.capacity_gib
    device = f"{memory.device_gib:.1f} GiB used on the device of {capacity:.1f} GiB"
    device += f" ({share(memory.device_gib / capacity)})"
    retries = (
        f" The allocator had to retry {plural(memory.alloc_retries, 'time')}: memory is tight."
        if memory.alloc_retries
        else " No allocation retries."
    )
    allocator = f"{memory.active_gib:.1f} GiB active, {memory.reserved_gib:.1f} GiB reserved"
    if memory.origin is Origin.DRY_RUN:
        return (
            f"{allocator}, measured on the ranks that ran; with what the model says of NCCL and the CUDA context,"
            f" {device}.{retries}"
        )
    return f"{allocator}, {device}; worst rank, measured.{retries}"


def numerics_sentence(found: Answer) -> str:
    """Whether the mathematics of the training changes."""
    if not found.changes_numerics:
        return "Numerics are unchanged: nothing here alters the mathematics of the training."
    named = [
        f"{c.name}: {c.before} → {c.after}" if c.before is not None else f"{c.name}: {c.after}"
        for c in found.numerics
    ]
    changes = "; ".join([*named, *found.layout_effects])
    run = "dry run" if found.origin is Origin.DRY_RUN else "short probe"
    return f"This changes numerics: {changes}. A {run} cannot show what it does to convergence."


def price_sentence(data: ReportData) -> str:
    """Probes and GPU-hours."""
    price = data.price
    kinds = ", ".join(f"{count} {status}" for status, count in price.statuses)
    ended = f" ({kinds})" if kinds else ""
    spent = f"{hours(price.gpu_hours)} {hour_unit(data)}"
    all_of_it = "from launch to end, start-up and compilation included (measured)"
    if data.all_dry_runs:
        return (
            f"{plural(price.probes, 'dry run')}{ended}; {spent}, one GPU for each rank that ran, {all_of_it}. The job's"
            f" {plural(price.world_size, data.worker)} were not needed."
        )
    if price.dry_runs:
        probes = f"{plural(price.probes - price.dry_runs, 'probe')} and {plural(price.dry_runs, 'dry run')}"
        return (
            f"{probes}{ended}; {spent}, {all_of_it}: a probe takes all {plural(price.world_size, data.worker)} of the"
            " job, a dry run one GPU for each rank that ran."
        )
    return (
        f"{plural(price.probes, 'probe')}{ended}; {hours(price.gpu_hours)} {hour_unit(data)} on"
        f" {plural(price.world_size, data.worker)}, from launch to end, start-up and compilation included (measured)."
    )


def break_even_sentence(data: ReportData) -> str:
    """After how much training the search has paid for itself, with the formula."""
    price, found = data.price, data.answer
    if found is None:
        return "Nothing was gained that could pay for it."
    if price.break_even is None or found.gain is None:
        kind = "gain" if data.has_dry_runs else "measured gain"
        return f"There is no break-even to state, because there is no {kind}."
    even = price.break_even
    dry = found.gain_origin is Origin.DRY_RUN
    start = "If the gain is what dry runs predict, the search pays" if dry else "The search pays"
    latest = _training(even.latest_hours) if even.latest_hours is not None else "never"
    return (
        f"{start} for itself if the training still ahead would take more than {_training(even.hours)} on"
        f" {plural(price.world_size, data.worker)} with the job as it was (between"
        f" {_training(even.earliest_hours)} and {latest} over the interval of the gain)."
    )


def break_even_formula(data: ReportData) -> str:
    """The computation, with its numbers."""
    price, found = data.price, data.answer
    if price.break_even is None or found is None or found.gain is None:
        return ""
    workers = plural(2, data.worker).removeprefix("2 ")
    if data.has_dry_runs:
        workers += " of the job"
    return (
        f"break-even hours = {hour_unit(data)} spent ÷ {workers} ÷ (gain ÷ (1 + gain))\n"
        f"                 = {_spent(price.gpu_hours)} ÷ {price.world_size}"
        f" ÷ ({found.gain:.4f} ÷ {1 + found.gain:.4f})\n"
        f"                 = {hours(price.break_even.hours)} h"
    )


def _training(value: float) -> str:
    """Hours of training; seconds where they are few."""
    return f"{3600.0 * value:.1f} s" if value < 0.01 else f"{hours(value)} h"


def _spent(gpu_hours: float) -> str:
    return f"{gpu_hours:.3f}" if gpu_hours >= 1.0 else f"{gpu_hours:.3g}"


def common_sentence(data: ReportData) -> str:
    """The choices that labels leave out."""
    if not data.common:
        return ""
    same = ", ".join(f"{axis}={label}" for axis, label in data.common)
    return f"The same in every {noun(data)}, and left out of the labels: {same}."


def order_note(data: ReportData) -> str:
    """Why the winner need not be the first line of the chart."""
    first = data.configurations[0] if data.configurations else None
    if first is None or first.is_best:
        return ""
    again = "ran again" if data.has_dry_runs else "were measured again"
    return (
        f"The best is chosen among the finalists, which {again} beside the job as it was;"
        " a configuration above it ran only while exploring."
    )


def error_sentence(data: ReportData, *, memory: bool) -> str:
    """How far the formula was off."""
    comparison = data.memory if memory else data.throughput
    what = "peak active memory" if memory else "throughput"
    if comparison.median_error is None or comparison.median_ratio is None:
        if memory and data.worker == "process":
            return "CPU processes report resident set size, which the formula does not predict."
        which = "configuration" if data.has_dry_runs else "measured configuration"
        return f"No {which} has a predicted {what}."
    bias = comparison.median_ratio - 1.0
    subject, off, by = "median measurement", "Median error", "its prediction"
    over = plural(comparison.compared, "measured configuration" if data.has_dry_runs else "configuration")
    if all(point.origin is Origin.DRY_RUN for point in comparison.points):
        over = plural(comparison.compared, "configuration")
        subject = "median peak, of the ranks that ran," if memory else "median dry run"
        off, by = ("Median error", by) if memory else ("Median distance from the dry run", "the formula")
    lean = "no lean to either side"
    if abs(bias) >= NO_LEAN:
        lean = f"the {subject} is {share(abs(bias))} {'above' if bias > 0 else 'below'} {by}"
    return f"{off} of the predicted {what}: {share(comparison.median_error)} over {over}; {lean}."


def surprise_sentence(data: ReportData) -> str:
    """Where the memory formula was too hopeful."""
    count = data.coverage.out_of_memory
    return (
        f"{plural(count, 'configuration')} that the formula let through ran out of memory." if count else ""
    )


def no_failures(data: ReportData) -> str:
    """What stands for an empty table of failures."""
    return f"No {noun(data)} failed." if data.trials else "No probe has finished."


def funnel_sentence(data: ReportData) -> str:
    """From every combination to what was measured."""
    c = data.coverage
    rejected = sum(r.count for r in c.rejected)
    ran = "had a dry run" if data.all_dry_runs else "were run"
    return (
        f"{c.total:,} combinations: {rejected:,} rejected by rule before any {data.worker} was used,"
        f" {c.duplicates:,} the same run as another, {c.candidates:,} candidates; {c.tried:,} of these {ran}."
    )
