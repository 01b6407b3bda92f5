"""The terminal view of an estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from titan_tune.domain.candidate import Finding
from titan_tune.domain.estimate import MemoryEstimate, StageMemory, StepTimeEstimate, Verdict
from titan_tune.domain.settings import Settings
from titan_tune.estimate.advice import Suggestion
from titan_tune.estimate.answer import Answer
from titan_tune.estimate.items import by_component
from titan_tune.units import GIB

BAR_CELLS = 56
COMPONENT_STYLE: Mapping[str, tuple[str, str]] = {
    "parameters": ("█", "blue"),
    "gradients": ("▓", "magenta"),
    "optimizer": ("▒", "cyan"),
    "activations": ("█", "green"),
    "attention_scores": ("▚", "red"),
    "logits_loss": ("▓", "yellow"),
    "gathered_parameters": ("▒", "bright_blue"),
    "other": ("░", "white"),
}
"""Glyph and colour: neighbours differ in both, so the bar reads without colour."""
VERDICT_WORDS = {
    Verdict.FITS: ("fits", "bold green"),
    Verdict.PRESSURE: ("fits under pressure", "bold yellow"),
    Verdict.DOES_NOT_FIT: ("does not fit", "bold red"),
}


def view(answer: Answer) -> RenderableType:
    """The whole answer, verdict first."""
    memory, step_time = answer.memory, answer.step_time
    if memory is None or step_time is None:
        return Group(
            Text.assemble(("invalid", "bold red"), f"  {_job_line(answer.settings)}"),
            *_findings("invalid", answer.invalid, "red"),
            *_findings("warning", answer.warnings, "yellow"),
        )
    parts: list[RenderableType] = [
        _verdict_line(answer.settings, memory),
        Text(),
        *_bars(memory),
        Text(),
        _figures(answer, memory, step_time),
        *_findings("warning", answer.warnings, "yellow"),
    ]
    if answer.suggestions:
        parts += [Text(), Text("what makes it fit", style="bold"), _suggestions_table(answer.suggestions)]
    elif memory.verdict is Verdict.DOES_NOT_FIT:
        parts += [Text(), Text("No single change or pair of changes makes it fit.")]
    return Group(*parts)


def _job_line(settings: Settings) -> str:
    model, cluster = settings.model, settings.cluster
    return f"{model.name} {model.flavor} on {cluster.world_size} × {cluster.gpu.name}"


def _verdict_line(settings: Settings, memory: MemoryEstimate) -> Text:
    word, style = VERDICT_WORDS[memory.verdict]
    upper = memory.active_interval[1] + memory.outside_bytes
    spare = memory.capacity_bytes - upper
    line = Text.assemble((word, style), f"  {_job_line(settings)}: ")
    if memory.verdict is Verdict.DOES_NOT_FIT:
        line.append(f"{_size(-spare)} too much for {_size(memory.capacity_bytes)}")
    elif memory.verdict is Verdict.PRESSURE:
        line.append(
            f"active memory leaves {_size(spare)}, but the allocator wants "
            f"{_size(memory.device_bytes - memory.capacity_bytes)} more than there is: "
            "expect allocation retries"
        )
    else:
        line.append(f"{_size(memory.capacity_bytes - memory.device_bytes)} to spare")
    return line


def _bars(memory: MemoryEstimate) -> Iterator[RenderableType]:
    """A stacked bar of each stage's peak on the card's scale, and the legend of the worst."""
    scale = max(memory.capacity_bytes, memory.active_bytes)
    table = Table.grid(padding=(0, 1))
    for stage in memory.stages:
        name = "peak" if len(memory.stages) == 1 else f"stage {stage.stage}"
        worst = len(memory.stages) > 1 and stage.stage == memory.worst_stage
        table.add_row(
            Text(name, style="bold" if worst else ""),
            _bar(stage, scale, memory.capacity_bytes),
            Text(f"{_size(stage.active_bytes)} in {_words(stage.peak.name)}"),
        )
    yield table
    legend = Text()
    for name, size in sorted(memory.components.items(), key=lambda item: -item[1]):
        if size >= 0.0005 * GIB:
            glyph, colour = COMPONENT_STYLE[name]
            legend.append(f"{glyph} ", style=colour)
            legend.append(f"{_words(name)} {_size(size)}   ")
    yield legend


def _bar(stage: StageMemory, scale: float, capacity: float) -> Text:
    bar, drawn, total = Text(), 0, 0.0
    for name, size in by_component(stage.peak.items).items():
        total += size
        cells = round(BAR_CELLS * total / scale) - drawn
        glyph, colour = COMPONENT_STYLE[name]
        bar.append(glyph * cells, style=colour)
        drawn += cells
    limit = round(BAR_CELLS * capacity / scale)
    bar.append("·" * (limit - drawn), style="dim")
    return bar


def _figures(answer: Answer, memory: MemoryEstimate, step_time: StepTimeEstimate) -> Table:
    low, high = memory.active_interval
    slow, fast = step_time.interval
    table = Table.grid(padding=(0, 2))
    for name, value, detail in (
        ("active", _size(memory.active_bytes), f"{_size(low)} to {_size(high)}: must fit"),
        ("reserved", _size(memory.reserved_bytes), "what torchtitan logs; holes can be given back"),
        (
            "device",
            _size(memory.device_bytes),
            f"reserved and {_size(memory.outside_bytes)} outside the allocator, "
            f"of {_size(memory.capacity_bytes)}",
        ),
        (
            "speed",
            f"{step_time.tokens_per_second_per_gpu:,.0f} tokens/s",
            f"per GPU, {slow:,.0f} to {fast:,.0f}; a step takes {step_time.seconds:.2f} s",
        ),
        ("minimum", _minimum(answer.minimum_gpus), "as it is, more or fewer data_parallel_shard ranks"),
        ("source", memory.method, "nothing was run; constants from H200, torch 2.11, torchtitan 0.2.2"),
    ):
        table.add_row(Text(name, style="bold"), Text(value, justify="right"), Text(detail, style="dim"))
    return table


def _minimum(gpus: int | None) -> str:
    if gpus is None:
        return "none"
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _findings(kind: str, findings: Sequence[Finding], colour: str) -> Iterator[RenderableType]:
    for finding in findings:
        yield Text()
        yield Text.assemble((kind, colour), f"  {finding.message} ", (f"({finding.rule})", "dim"))
        if finding.fix:
            yield Text(f"  fix: {finding.fix}")


def _suggestions_table(suggestions: Sequence[Suggestion]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("change", overflow="fold")
    for name in ("GPUs", "active", "device", "tokens/s/GPU"):
        table.add_column(name, justify="right")
    table.add_column("")
    for suggestion in suggestions:
        memory = suggestion.memory
        note = "changes numerics" if suggestion.changes_numerics else ""
        if memory.verdict is Verdict.PRESSURE:
            note = f"{note}, under pressure".lstrip(", ")
        table.add_row(
            Text(suggestion.text),
            str(suggestion.gpus),
            _size(memory.active_bytes),
            _size(memory.device_bytes),
            f"{suggestion.tokens_per_second_per_gpu:,.0f}",
            note,
        )
    return table


def sweep_view(key: str, answers: Sequence[tuple[str, Answer]]) -> Table:
    """One row a value of ``key``."""
    table = Table(box=None, pad_edge=False)
    table.add_column(key.rpartition(".")[2], overflow="fold")
    for name in ("active", "reserved", "device", "tokens/s/GPU"):
        table.add_column(name, justify="right")
    table.add_column("peak in")
    table.add_column("verdict")
    for label, answer in answers:
        memory, step_time = answer.memory, answer.step_time
        if memory is None or step_time is None:
            table.add_row(
                Text(label), "", "", "", "", "", Text(f"invalid: {answer.invalid[0].rule}", style="red")
            )
            continue
        word, style = VERDICT_WORDS[memory.verdict]
        table.add_row(
            Text(label),
            _size(memory.active_bytes),
            _size(memory.reserved_bytes),
            _size(memory.device_bytes),
            f"{step_time.tokens_per_second_per_gpu:,.0f}",
            _words(memory.peak.name),
            Text(word, style=style),
        )
    return table


def _size(num_bytes: float) -> str:
    """GiB with the digits that matter."""
    digits = 1 if num_bytes >= GIB else 2 if num_bytes >= 0.1 * GIB else 3
    return f"{num_bytes / GIB:.{digits}f} GiB"


def _words(name: str) -> str:
    return "logits and loss" if name == "logits_loss" else name.replace("_", " ")
