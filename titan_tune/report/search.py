"""What a person sees of a search: a live picture on a terminal, plain lines elsewhere, a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from titan_tune.domain.probe import Origin, ProbeStatus
from titan_tune.space.axes import Budget
from titan_tune.study.budget import SECONDS_PER_HOUR, Spent
from titan_tune.study.plan import Plan, label_of
from titan_tune.study.records import TrialRecord
from titan_tune.study.selection import Standing, Winner, roomier, standings, winner
from titan_tune.study.view import Running, Snapshot
from titan_tune.units import format_duration, format_gib

SHOWN_CONFIGURATIONS = 10
WIDE_COLUMNS = 112
"""From here on the ranking has its configurations in the table."""
SHOWN_FAILURES = 8
SHOWN_CHARACTERS = 160
NOISY_SPREAD = 0.05
"""Repeats of one configuration that differ by more are pointed out; an H200 alone repeats within 3 %."""
DRY_RUN_NOTE = (
    "dry run: single ranks of the job ran alone, on one GPU each; their memory and compute are measured, communication"
    " and pipeline bubble are computed"
)
STATUS_STYLE = {
    ProbeStatus.COMPLETED: "green",
    ProbeStatus.INFRASTRUCTURE: "yellow",
    ProbeStatus.CANCELLED: "yellow",
}


def tokens(value: float) -> str:
    """Tokens per second for people."""
    return f"{value:,.0f}"


def percent(fraction: float) -> str:
    """A signed percentage."""
    return f"{100 * fraction:+.1f} %"


class PlainView:
    """One line an event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, snapshot: Snapshot) -> None:
        """Say when the stage changes."""
        if snapshot.stage != self._stage:
            self._stage = snapshot.stage
            self._console.print(f"stage: {snapshot.stage}", highlight=False)

    def finished(self, record: TrialRecord, label: str) -> None:
        """One line for the probe."""
        self._console.print(finished_line(record, label), highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """One line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveView(PlainView):
    """A picture that stays at the bottom of the terminal while finished probes scroll above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, value, trace)

    def update(self, snapshot: Snapshot) -> None:
        """Redraw."""
        self._live.update(picture(snapshot))


def finished_line(record: TrialRecord, label: str) -> Text:
    """What one probe came to."""
    outcome = record.outcome
    line = Text(f"#{record.number:<3} {record.role:<8} ")
    line.append(f"{outcome.status:<12} ", style=STATUS_STYLE.get(outcome.status, "red"))
    line.append(f"{format_duration(outcome.seconds):>9}  ")
    if record.measurement:
        low, high = record.measurement.interval
        line.append(
            f"{tokens(record.measurement.tokens_per_second_per_gpu):>9} tokens/s per GPU", style="bold"
        )
        line.append(said_of(record.outcome.origin))
        line.append(
            f" ({tokens(low)} – {tokens(high)})  {format_gib(record.measurement.peak_reserved_bytes):>9}  "
        )
    line.append(label)
    if not record.measurement:
        line.append(f"  {shortened(outcome.message)}", style="dim")
    return line


def said_of(origin: Origin) -> str:
    """What follows a throughput that was not measured."""
    return f", {origin}" if origin is Origin.DRY_RUN else ""


def shortened(message: str) -> str:
    """The beginning of a message; all of it is in the trial's ``outcome.json``."""
    return message if len(message) <= SHOWN_CHARACTERS else f"{message[:SHOWN_CHARACTERS]}…"


def picture(snapshot: Snapshot) -> RenderableType:
    """The live picture: running, best, rejected, budget."""
    parts: list[RenderableType] = [Text("")]
    for running in snapshot.running:
        parts.append(running_line(running))
    best = winner(snapshot.records)
    if best:
        parts.append(best_line(best, snapshot.plan))
    parts.append(counts_line(snapshot))
    parts.append(
        budget_line(snapshot.plan.space.budget, snapshot.spent, snapshot.plan.space.cluster.world_size)
    )
    return Group(*parts)


def running_line(running: Running) -> RenderableType:
    """One probe in flight, with its progress, its configuration below it."""
    progress = running.progress
    table = Table.grid(padding=(0, 1))
    speed = f"{tokens(progress.tokens_per_second)} tokens/s" if progress.tokens_per_second else ""
    table.add_row(
        Text(f"running {running.role}", style="bold cyan"),
        ProgressBar(total=max(progress.steps, 1), completed=progress.step, width=20),
        f"{progress.phase} {progress.step}/{progress.steps}",
        format_duration(progress.seconds),
        speed,
    )
    return Group(table, Padding(Text(running.label), (0, 0, 0, 2)))


def best_line(best: Winner, plan: Plan) -> Text:
    """Best so far and what it gains."""
    line = Text("best so far ", style="bold green")
    line.append(f"{tokens(best.standing.tokens_per_second)} tokens/s per GPU{said_of(best.standing.origin)}")
    if best.gain is not None:
        line.append(f"  {percent(best.gain)} over the job as it is")
    ranked = plan.by_id.get(best.standing.config_id)
    line.append(f"  {ranked.label if ranked else best.standing.config_id}", style="default")
    return line


def counts_line(snapshot: Snapshot) -> Text:
    """How many candidates, measured, failed, rejected by reason."""
    plan = snapshot.plan
    explored = {r.config_id for r in snapshot.records}
    line = Text(f"{len(plan.pool)} candidates, {len(explored)} tried")
    if snapshot.elsewhere:
        line.append(f", {snapshot.elsewhere} in flight in other searches")
    reasons = ", ".join(f"{rule} {count}" for rule, count in plan.rejected.most_common(5))
    if reasons:
        line.append(f"; rejected before any GPU: {reasons}", style="dim")
    return line


def budget_line(budget: Budget, spent: Spent, world_size: int) -> Text:
    """What is used and what is left."""
    parts = [f"probes {spent.probes}" + (f"/{budget.max_probes}" if budget.max_probes is not None else "")]
    hours = spent.gpu_seconds / SECONDS_PER_HOUR
    parts.append(
        f"GPU-hours {hours:.2f}" + (f"/{budget.max_gpu_hours:g}" if budget.max_gpu_hours is not None else "")
    )
    clock = f"wall clock {format_duration(spent.wall_seconds)}"
    if budget.max_wall_clock_hours is not None:
        clock += f" of {format_duration(budget.max_wall_clock_hours * SECONDS_PER_HOUR)}"
    parts.append(clock)
    return Text("  ".join(parts), style="dim")


def plan_view(plan: Plan) -> RenderableType:
    """What a search is about to do."""
    space = plan.space
    table = Table.grid(padding=(0, 2))
    model = space.base.model
    table.add_row(
        "model", Text(f"{model.name} {model.flavor}, sequence {space.base.get('training.seq_len')}")
    )
    cluster = space.cluster
    nodes = f"{cluster.num_nodes} × " if cluster.num_nodes > 1 else ""
    table.add_row(
        "on", f"{nodes}{cluster.gpus_per_node} × {cluster.gpu.name} ({cluster.gpu.memory_gib:.1f} GiB)"
    )
    table.add_row("held fixed", f"global batch {space.global_batch_size} sequences")
    for axis in space.axes:
        values = [value.label for value in axis.values]
        shown = ", ".join(values[:8]) + (f", … ({len(values)} in all)" if len(values) > 8 else "")
        mark = "  (changes numerics)" if axis.name in space.numerics_axes else ""
        table.add_row(Text(f"axis {axis.name}"), Text(shown + mark))
    table.add_row(
        "candidates",
        f"{plan.total} combinations, {plan.duplicates} the same as another, {sum(plan.rejected.values())} rejected,"
        f" {len(plan.pool)} left",
    )
    for rule, count in plan.rejected.most_common():
        table.add_row("", Text(f"{count} × {rule}: {plan.examples[rule].message}", style="dim"))
    if plan.baseline_problem:
        table.add_row(Text("no baseline", style="yellow"), Text(plan.baseline_problem.message))
    for note in plan.notes:
        table.add_row(Text("note", style="yellow"), Text(note))
    return table


def summary(
    records: Sequence[TrialRecord],
    *,
    numerics_axes: Sequence[str] = (),
    layout_effects: Sequence[str] = (),
    world_size: int = 1,
) -> RenderableType:
    """The configurations with a throughput, best first, and what became of the rest.

    ``layout_effects``: what sets the best one's mathematics apart (:func:`titan_tune.study.numerics.winner_effects`).
    """
    dry = [r.outcome.origin is Origin.DRY_RUN for r in records]
    best = winner(records)
    base = best.baseline if best else None
    ranked = standings(records)
    interval = "assumed interval" if dry and all(dry) else "interval" if any(dry) else "95 % interval"
    parts: list[RenderableType] = []
    if ranked:
        parts.append(Ranking(ranked, base, interval, with_origin=any(dry)))
    else:
        none = f"nothing was measured in {_counts(records) or 'no probe'}"
        parts.append(Text(none, style="bold yellow"))
    if any(s.final for s in ranked):
        parts.append(Text("* took part in the finals: those runs, interleaved with the baseline's, decide"))
    if ranked and any(dry):
        parts.append(Text(DRY_RUN_NOTE, style="yellow"))
    failed = [r for r in records if not r.measurement]
    for record in failed[:SHOWN_FAILURES]:
        message = shortened(record.outcome.message)
        what = "dry run failed" if record.outcome.origin is Origin.DRY_RUN else "not measured"
        text = f"{what}: #{record.number} {record.outcome.status}: {message} ({record.directory})"
        parts.append(Text(text, style="dim"))
    if len(failed) > SHOWN_FAILURES:
        parts.append(Text(f"… and {len(failed) - SHOWN_FAILURES} more", style="dim"))
    if best:
        parts.append(Text(verdict_line(best, records, world_size=world_size), style="bold green"))
        changed = [axis for axis in numerics_axes if base and _differs(best.standing, base, axis)]
        if changed or layout_effects:
            text = "; ".join([*([", ".join(changed)] if changed else []), *layout_effects])
            parts.append(Text(f"this configuration changes numerics: {text}", style="yellow"))
        noise = max((s.spread for s in ranked), default=0.0)
        if noise > NOISY_SPREAD:
            text = f"runs of one configuration differ by up to {noise:.0%} here: smaller gains mean nothing"
            parts.append(Text(text, style="yellow"))
        parts += [Text(f"warning: {text}", style="yellow") for text in best.standing.latest.outcome.warnings]
        if (other := roomier(records)) is not None:
            parts.append(Text(roomier_line(other, best.standing), style="yellow"))
    return Group(*parts)


def roomier_line(other: Standing, best: Standing) -> str:
    """That a configuration with memory to spare is as fast as can be told."""
    behind = 1.0 - other.tokens_per_second / best.tokens_per_second
    peak = max(r.measurement.peak_reserved_bytes for r in other.runs if r.measurement)
    return (
        f"as fast as can be told, and with memory to spare: #{other.latest.number}, {behind:.1%} behind at"
        f" {format_gib(peak)} without retries; export it with --trial {other.latest.number}"
    )


def verdict_line(best: Winner, records: Sequence[TrialRecord], *, world_size: int) -> str:
    """Winner, gain with its interval, price."""
    hours = sum(r.outcome.gpu_seconds(world_size) for r in records) / SECONDS_PER_HOUR
    price = f"{_counts(records)}, {hours:.2f} GPU-hours"
    speed = f"{tokens(best.standing.tokens_per_second)} tokens/s per GPU{said_of(best.standing.origin)}"
    dry = any(r.outcome.origin is Origin.DRY_RUN for r in records)
    if best.gain is None or best.gain_interval is None:
        none = "there is no throughput of the baseline" if dry else "no baseline was measured"
        return f"best: {speed}; {none}; {price}"
    if best.baseline and best.standing.config_id == best.baseline.config_id:
        return f"best: {speed}: nothing {'tried' if dry else 'measured'} beats the job as it is; {price}"
    low, high = best.gain_interval
    predicted = "predicted gain " if best.gain_origin is Origin.DRY_RUN else ""
    return (
        f"best: {speed}, {predicted}{percent(best.gain)} over the job as it is"
        f" (between {percent(low)} and {percent(high)}); {price}"
    )


def _counts(records: Sequence[TrialRecord]) -> str:
    """``12 probes``, ``3 dry runs`` or both; cancelled ones run again and do not count."""
    ended = [r for r in records if r.outcome.status is not ProbeStatus.CANCELLED]
    dry = sum(r.outcome.origin is Origin.DRY_RUN for r in ended)
    kinds = ((len(ended) - dry, "probe"), (dry, "dry run"))
    return " and ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in kinds if count)


@dataclass(frozen=True)
class Ranking:
    """The table of configurations, best first; where it has no room for their names, these follow it."""

    ranked: Sequence[Standing]
    base: Standing | None
    interval: str
    with_origin: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [
            (_place(number, standing), _row(standing, self.base, with_origin=self.with_origin), standing)
            for number, standing in enumerate(self.ranked[:SHOWN_CONFIGURATIONS], start=1)
        ]
        if options.max_width >= WIDE_COLUMNS:
            table = Table(header_style="bold")
            self._columns(table, {})
            table.add_column("configuration", overflow="fold")
            for place, row, standing in rows:
                table.add_row(place, *row, Text(label_of(standing.latest.choices)))
            yield table
            return
        table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        self._columns(table, {"tokens/s per GPU": "tokens/s\nper GPU", "peak memory": "peak\nmemory"})
        names = Table.grid(padding=(0, 1))
        names.add_column(justify="right", no_wrap=True)
        for place, row, standing in rows:
            table.add_row(place, *row)
            names.add_row(place, Text(label_of(standing.latest.choices)))
        yield table
        yield names
        yield Text("")

    def _columns(self, table: Table, folded: Mapping[str, str]) -> None:
        origin = ("from",) if self.with_origin else ()
        for name in ("", "tokens/s per GPU", *origin, self.interval, "gain", "peak memory"):
            table.add_column(folded.get(name, name), justify="right", no_wrap=True)
        table.add_column("runs", justify="right")


def _place(number: int, standing: Standing) -> str:
    return f"{number}{'*' if standing.final else ''}"


def _row(standing: Standing, base: Standing | None, *, with_origin: bool) -> list[str]:
    low, high = standing.interval
    measurement = standing.latest.measurement
    gain = standing.tokens_per_second / base.tokens_per_second - 1.0 if base else None
    is_base = base is not None and base.config_id == standing.config_id
    runs = str(len(standing.runs)) + (f" (spread {standing.spread:.1%})" if len(standing.runs) > 1 else "")
    return [
        tokens(standing.tokens_per_second),
        *([str(standing.origin)] if with_origin else []),
        f"{tokens(low)} – {tokens(high)}",
        "baseline" if is_base else percent(gain) if gain is not None else "",
        format_gib(measurement.peak_reserved_bytes) if measurement else "",
        runs,
    ]


def _differs(one: Standing, other: Standing, axis: str) -> bool:
    return one.latest.choices.get(axis) != other.latest.choices.get(axis)


def make_view(console: Console) -> PlainView:
    """A live picture on a terminal, plain lines elsewhere."""
    return LiveView(console) if console.is_terminal else PlainView(console)
