"""The terminal view of an estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from titan_tune.domain.candidate import Finding
from titan_tune.domain.estimate import MemoryEstimate, Verdict
from titan_tune.domain.settings import Settings
from titan_tune.estimate.accounting import GB, Accounting
from titan_tune.estimate.accounting import Line as AccountingLine
from titan_tune.estimate.accounting import Table as AccountingTable
from titan_tune.estimate.advice import MAX_HOST_BYTES, Suggestion, host_bytes
from titan_tune.estimate.answer import Answer
from titan_tune.estimate.changes import compute_dtype
from titan_tune.estimate.minimum import Minimum
from titan_tune.report.memory_bars import Layouts, MemoryBars, size, words

LARGEST = 3
"""Components that are named where no number of GPUs is enough."""
VERDICT_CELLS = 12
"""Columns of a sweep's verdict in a narrow terminal."""
NO_CHANGE = "no other change"
"""A suggestion of more GPUs alone."""
VERDICT_WORDS = {
    Verdict.FITS: ("fits", "bold green"),
    Verdict.PRESSURE: ("fits under pressure", "bold yellow"),
    Verdict.DOES_NOT_FIT: ("does not fit", "bold red"),
}


def view(answer: Answer) -> RenderableType:
    """The whole answer, verdict first."""
    memory = answer.memory
    if memory is None:
        return Group(
            Text.assemble(("invalid", "bold red"), f"  {job_line(answer.settings)}"),
            *_findings("invalid", answer.invalid, "red"),
            *_findings("warning", answer.warnings, "yellow"),
        )
    parts: list[RenderableType] = [
        _verdict_line(answer.settings, memory),
        *_needs(answer),
        Text(),
        MemoryBars(memory),
        Text(),
        _figures(answer, memory),
        *_findings("warning", answer.warnings, "yellow"),
    ]
    if answer.suggestions:
        title = Text(suggestions_title(answer, memory).lower(), style="bold")
        parts += [Text(), title, _suggestions_table(answer.settings, answer.suggestions)]
    if memory.assumptions:
        parts += [Text(), Text("taken for granted", style="bold")]
        parts += [Text(f"- {sentence}") for sentence in memory.assumptions]
    if answer.accounting is not None:
        parts += [Text(), *accounting_view(answer.accounting)]
    return Group(*parts)


def job_line(settings: Settings) -> str:
    """Model and hardware, e.g. ``llama3 8B on 8 × h100-80gb``."""
    model, cluster = settings.model, settings.cluster
    return f"{model.name} {model.flavor} on {cluster.world_size} × {cluster.gpu.name}"


def _verdict_line(settings: Settings, memory: MemoryEstimate) -> Text:
    word, style = VERDICT_WORDS[memory.verdict]
    return Text.assemble((word, style), f"  {job_line(settings)}: {room(memory)}")


def room(memory: MemoryEstimate) -> str:
    """How much is to spare, or missing."""
    capacity, outside = memory.capacity_bytes, memory.outside_bytes
    if memory.verdict is Verdict.DOES_NOT_FIT:
        need = memory.active_bytes + outside
        return (
            f"a GPU needs {size(need)} and has {size(capacity)}; {size(need - capacity)} too much, "
            "whatever the allocator gives back"
        )
    if memory.verdict is Verdict.FITS:
        return f"{size(capacity - memory.device_bytes)} of {size(capacity)} to spare"
    if memory.active_interval[1] + outside > capacity:
        return f"it may or may not: active memory could come to {size(memory.active_interval[1])}, too much"
    return (
        f"active memory leaves {size(capacity - memory.active_interval[1] - outside)}, but the allocator "
        f"wants {size(memory.device_bytes - capacity)} more than there is: expect allocation retries"
    )


def needs(answer: Answer) -> list[tuple[str, str]]:
    """What a job that does not fit would take, as name and text: GPUs alone, then the cheapest changes."""
    memory, world_size = answer.memory, answer.settings.cluster.world_size
    if memory is None or memory.verdict is not Verdict.DOES_NOT_FIT or answer.minimum is None:
        return []
    found = [("as it is", _alone(answer.minimum, answer.settings))]
    kept = [s for s in answer.suggestions if not s.changes_numerics]
    here = next((s for s in kept if s.gpus <= world_size), None)
    found.append((f"on {count_gpus(world_size)}", described(here) if here else _nothing(answer.settings)))
    more = next((s for s in kept if s.gpus > world_size and s.memory.verdict is Verdict.FITS), None)
    if more is not None and more.values:
        found.append((f"on {count_gpus(more.gpus)}", described(more)))
    if answer.traces:
        found.append(("by formula", "all of these: only the job itself was traced"))
    return found


def _alone(minimum: Minimum, settings: Settings) -> str:
    """What GPUs alone would do."""
    if minimum.fits is not None:
        asked = minimum.compute_dtype
        precision = "" if asked == compute_dtype(settings) else f", where it computes in {asked}"
        pressure = f", or {minimum.pressure} under pressure" if minimum.pressure else ""
        return f"{count_gpus(minimum.fits)}{precision}{pressure}"
    refused = ""
    if minimum.refused is not None:
        refused = f"{count_gpus(minimum.refused[0])} are refused: {minimum.refused[1].message}"
    if minimum.least is None:
        return f"no number of GPUs is enough; {refused}" if refused else "no number of GPUs is enough"
    gpus, memory = minimum.least
    largest = sorted(memory.components.items(), key=lambda item: -item[1])[:LARGEST]
    left = ", ".join(f"{words(name)} {size(held)}" for name, held in largest if held > 0)
    if minimum.pressure is not None:
        head = f"{count_gpus(minimum.pressure)}, under pressure; without it no number is enough"
        need = f"wants {size(memory.device_bytes)}"
    else:
        sure = "" if memory.verdict is Verdict.DOES_NOT_FIT else "sure to be "
        head, need = f"no number of GPUs is {sure}enough", f"needs {size(memory.active_bytes)}"
    text = f"{head}: on {count_gpus(gpus)}, each still {need} ({left})"
    return f"{text}; {refused}" if refused else text


def _nothing(settings: Settings) -> str:
    """That no change helps on these GPUs; what offloading would take, where it is out of the question."""
    text = "no change that keeps the numerics"
    if settings.cpu_offload or settings.dims.fsdp_degree == 1:
        return text
    held = host_bytes(settings)
    if held <= MAX_HOST_BYTES:
        return text
    return (
        f"{text}; training.enable_cpu_offload would take {size(held)} of a node's memory, too much to offer"
    )


def described(suggestion: Suggestion) -> str:
    """A suggestion with its figures in one line."""
    pressure = ", under pressure" if suggestion.memory.verdict is Verdict.PRESSURE else ""
    host = "" if suggestion.host_bytes is None else f", {size(suggestion.host_bytes)} of host memory a node"
    return (
        f"{suggestion.text or NO_CHANGE} ({size(suggestion.memory.active_bytes)} active{pressure}{host}, "
        f"{suggestion.tokens_per_second_per_gpu:,.0f} tokens/s per GPU)"
    )


def suggestions_title(answer: Answer, memory: MemoryEstimate) -> str:
    """What the suggestions are for, and beside a trace by what they are found."""
    pressure = memory.verdict is Verdict.PRESSURE
    title = "What takes the pressure away" if pressure else "What makes it fit"
    return f"{title}, by formula" if answer.traces else title


def suggestion_notes(settings: Settings, suggestion: Suggestion) -> list[str]:
    """What else there is to know of a suggestion for the job with ``settings``."""
    changed = suggestion.settings
    notes = ["changes numerics"] if suggestion.changes_numerics else []
    if suggestion.memory.verdict is Verdict.PRESSURE:
        notes.append("under pressure")
    if changed.global_batch_size != settings.global_batch_size:
        notes.append(f"global batch {settings.global_batch_size} becomes {changed.global_batch_size}")
    if compute_dtype(changed) != compute_dtype(settings) and not suggestion.changes_numerics:
        notes.append(f"computes in {compute_dtype(changed)}")
    if suggestion.host_bytes is not None:
        notes.append(f"{size(suggestion.host_bytes)} of host memory a node")
    return notes + [f"warning {rule}" for rule in suggestion.warnings]


def count_gpus(gpus: int) -> str:
    """``1 GPU``, ``8 GPUs``."""
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _needs(answer: Answer) -> Iterator[RenderableType]:
    found = needs(answer)
    if found:
        table = Table.grid(padding=(0, 2))
        for name, text in found:
            table.add_row(Text(name, style="bold"), Text(text))
        yield Text()
        yield table


def _figures(answer: Answer, memory: MemoryEstimate) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value, detail in figures(answer, memory):
        table.add_row(Text(name, style="bold"), Text(value, justify="right"), Text(detail, style="dim"))
    return table


def figures(answer: Answer, memory: MemoryEstimate) -> list[tuple[str, str, str]]:
    """Name, value and explanation of each figure."""
    low, high = memory.active_interval
    found = [
        ("active", size(memory.active_bytes), f"{size(low)} to {size(high)}: must fit"),
        ("reserved", size(memory.reserved_bytes), "what torchtitan logs; holes can be given back"),
        (
            "device",
            size(memory.device_bytes),
            f"reserved and {size(memory.outside_bytes)} outside the allocator, "
            f"of {size(memory.capacity_bytes)}",
        ),
    ]
    step_time = answer.step_time
    if step_time is not None:
        slow, fast = step_time.interval
        speed = f"{step_time.tokens_per_second_per_gpu:,.0f} tokens/s"
        found.append(
            ("speed", speed, f"per GPU, {slow:,.0f} to {fast:,.0f}; a step takes {step_time.seconds:.2f} s")
        )
        if answer.dry_run is None:  # one configuration was run, no other
            value, detail = _minimum(answer.minimum)
            found.append(("minimum", value, f"by formula, {detail}" if answer.traces else detail))
    return [*found, ("source", memory.method, _source(answer))]


def _source(answer: Answer) -> str:
    if answer.dry_run is not None:
        return "run without peers: memory and compute measured, communication and pipeline bubble computed"
    if not answer.traces:
        rates = answer.settings.cluster.rates
        measured = f"; speeds {rates.source}" if rates is not None else ""
        return f"nothing was run; constants from H200, torch 2.11, torchtitan 0.2.2{measured}"
    seconds = sum(trace.seconds for trace in answer.traces)
    beside = (
        "; speed and minimum by formula"
        if answer.step_time
        else "; the formula knows no speed for this model"
    )
    return f"two steps of the real model under fake tensors, {seconds:.0f} s on the CPU{beside}"


def _minimum(minimum: Minimum | None) -> tuple[str, str]:
    """Value and explanation."""
    if minimum is None:
        return "none", ""
    fits = "none" if minimum.fits is None else count_gpus(minimum.fits)
    pressure = f"; {count_gpus(minimum.pressure)} under pressure" if minimum.pressure else ""
    return fits, f"as it is, more or fewer data_parallel_shard ranks{pressure}"


def _findings(kind: str, findings: Sequence[Finding], colour: str) -> Iterator[RenderableType]:
    for finding in findings:
        yield Text()
        yield Text.assemble((kind, colour), f"  {finding.message} ", (f"({finding.rule})", "dim"))
        if finding.fix:
            yield Text(f"  fix: {finding.fix}")


def _suggestions_table(settings: Settings, suggestions: Sequence[Suggestion]) -> RenderableType:
    return Layouts(*(_suggestions(settings, suggestions, beside=beside) for beside in (True, False)))


def _suggestions(settings: Settings, suggestions: Sequence[Suggestion], *, beside: bool) -> Table:
    """Notes in a column of their own, or below the change."""
    table = Table(box=None, pad_edge=False)
    table.add_column("change", overflow="fold")
    for name in ("GPUs", "active", "device", "tokens/s/GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    if beside:
        table.add_column("")
    for suggestion in suggestions:
        memory, change = suggestion.memory, Text("\n".join(suggestion.lines) or NO_CHANGE)
        notes = suggestion_notes(settings, suggestion)
        if not beside:
            change.append("".join(f"\n  {note}" for note in notes), style="dim")
        table.add_row(
            change,
            str(suggestion.gpus),
            size(memory.active_bytes),
            size(memory.device_bytes),
            f"{suggestion.tokens_per_second_per_gpu:,.0f}",
            *([", ".join(notes)] if beside else []),
        )
    return table


def sweep_view(key: str, answers: Sequence[tuple[str, Answer]]) -> RenderableType:
    """One row a value of ``key``."""
    return Layouts(*(_sweep(key.rpartition(".")[2], answers, wide=wide) for wide in (True, False)))


def _sweep(name: str, answers: Sequence[tuple[str, Answer]], *, wide: bool) -> Table:
    """Reserved memory, which differs from the device's by a constant, only where there is room."""
    table = Table(box=None, pad_edge=False)
    table.add_column(name, overflow="fold", min_width=len(name))
    numbers = ("active", "reserved", "device", "tokens/s/GPU")
    for number in numbers if wide else ("active", "device", "tokens/s\nper GPU"):
        table.add_column(number, justify="right", no_wrap=True)
    table.add_column("peak in")
    table.add_column("verdict", min_width=VERDICT_CELLS)
    empty = [""] * (len(table.columns) - 2)
    for label, answer in answers:
        memory, step_time = answer.memory, answer.step_time
        if memory is None:
            table.add_row(Text(label), *empty, Text(f"invalid: {answer.invalid[0].rule}", style="red"))
            continue
        word, style = VERDICT_WORDS[memory.verdict]
        table.add_row(
            Text(label),
            size(memory.active_bytes),
            *([size(memory.reserved_bytes)] if wide else []),
            size(memory.device_bytes),
            f"{step_time.tokens_per_second_per_gpu:,.0f}" if step_time else "",
            words(memory.peak.name),
            Text(word, style=style),
        )
    return table


def accounting_view(found: Accounting) -> Iterator[RenderableType]:
    """The quoted rules and what torchtitan holds, in decimal GB."""
    yield Text("parameters, gradients and optimizer, decimal GB (no activations)", style="bold")
    for part in (found.quoted, found.mixed, found.held):
        yield Text(f"{accounting_title(part, found.world_size)}")
        table = Table(box=None, pad_edge=False, show_edge=False)
        for name, width in (("", 12), ("dtype", 12)):
            table.add_column(name, min_width=width)
        for name in ("bytes/parameter", "GB in all", "GB a GPU"):
            table.add_column(name, justify="right", min_width=9)
        for line in part.lines:
            table.add_row(line.component, line.dtype, *_gb(line.bytes_per_parameter, line))
        table.add_row("in all", "", *_gb(part.bytes_per_parameter, part), style="bold")
        yield table
        yield Text()
    yield from (Text(f"- {note}") for note in found.notes)


def accounting_title(part: AccountingTable, world_size: int) -> str:
    """What one part of the table is."""
    count = f"{part.parameters / 1e9:,.2f}".rstrip("0").rstrip(".")
    where = "" if part.rank_bytes is None else f", {world_size} GPUs"
    return f"{part.name} ({part.source}): {count} billion parameters{where}"


def _gb(bytes_per_parameter: float, held: AccountingLine | AccountingTable) -> tuple[str, str, str]:
    rank = "" if held.rank_bytes is None else f"{held.rank_bytes / GB:,.1f}"
    return f"{bytes_per_parameter:g}", f"{held.total_bytes / GB:,.1f}", rank
