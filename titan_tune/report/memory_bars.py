"""Memory in a terminal: bars and their legend, as wide as the terminal allows, and layouts for narrow ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from titan_tune.domain.estimate import MemoryEstimate, StageMemory
from titan_tune.estimate.items import by_component
from titan_tune.units import GIB

BAR_CELLS = 56
"""Of a bar where there is room."""
LEAST_BAR_CELLS = 16
LEAST_SHOWN = 0.0005 * GIB
"""Components below it are not in the legend."""
UNBOUNDED = 1000
"""Columns to measure in what a layout would like to have."""
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


class Layouts:
    """The first of several layouts that the console is wide enough for; else the last."""

    def __init__(self, *layouts: RenderableType) -> None:
        self._layouts = layouts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The chosen one."""
        unbounded = options.update_width(UNBOUNDED)
        for layout in self._layouts[:-1]:
            if Measurement.get(console, unbounded, layout).maximum <= options.max_width:
                yield layout
                return
        yield self._layouts[-1]


class MemoryBars:
    """A stacked bar of each stage's peak on the card's scale, and the legend of the worst in the bar's order."""

    def __init__(self, memory: MemoryEstimate) -> None:
        self._memory = memory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Bars, then legend."""
        memory = self._memory
        scale = max(memory.capacity_bytes, memory.active_bytes)
        rows = [(self._name(stage), self._peak(stage), stage) for stage in memory.stages]
        beside = max(len(name) + len(peak) for name, peak, _ in rows) + 2
        cells = max(LEAST_BAR_CELLS, min(BAR_CELLS, options.max_width - beside - 1))
        table = Table.grid(padding=(0, 1))
        for name, peak, stage in rows:
            worst = len(rows) > 1 and stage.stage == memory.worst_stage
            bar = _bar(stage, scale, memory.capacity_bytes, cells)
            table.add_row(Text(name, style="bold" if worst else ""), bar, Text(peak))
        yield table
        yield from _legend(memory, options.max_width)

    def _name(self, stage: StageMemory) -> str:
        return "peak" if len(self._memory.stages) == 1 else f"stage {stage.stage}"

    def _peak(self, stage: StageMemory) -> str:
        return f"{size(stage.active_bytes)} in {words(stage.peak.name)}"


def _legend(memory: MemoryEstimate, width: int) -> Iterator[Text]:
    """Lines of at most ``width`` columns; a glyph stays with its name and figure."""
    line = Text()
    for name, held in by_component(memory.components).items():
        if held < LEAST_SHOWN:
            continue
        glyph, colour = COMPONENT_STYLE[name]
        entry = Text.assemble((glyph, colour), f" {words(name)} {size(held)}")
        if line and len(line) + 3 + len(entry) > width:
            yield line
            line = Text()
        line = Text.assemble(line, "   ", entry) if line else entry
    yield line


def _bar(stage: StageMemory, scale: float, capacity: float, width: int) -> Text:
    bar, drawn, total = Text(), 0, 0.0
    for name, held in by_component(stage.peak.items).items():
        total += held
        cells = round(width * total / scale) - drawn
        glyph, colour = COMPONENT_STYLE[name]
        bar.append(glyph * cells, style=colour)
        drawn += cells
    limit = round(width * capacity / scale)
    if limit < drawn:  # where the card ends
        bar = Text.assemble(bar[:limit], ("│", "bold red"), bar[limit:])
    else:
        bar.append("·" * (limit - drawn), style="dim")
    return bar


def size(num_bytes: float) -> str:
    """GiB with the digits that matter."""
    digits = 1 if num_bytes >= GIB else 2 if num_bytes >= 0.1 * GIB else 3
    return f"{num_bytes / GIB:.{digits}f} GiB"


def words(name: str) -> str:
    """A phase or component for people."""
    return "logits and loss" if name == "logits_loss" else name.replace("_", " ")
