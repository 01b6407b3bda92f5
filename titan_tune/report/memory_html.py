"""The page of ``estimate --html``: one self-contained file, no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from titan_tune.domain.candidate import Finding
from titan_tune.domain.estimate import MemoryEstimate, Verdict
from titan_tune.domain.settings import AcMode, Settings
from titan_tune.estimate.accounting import GB, Accounting
from titan_tune.estimate.answer import Answer
from titan_tune.estimate.items import COMPONENTS, by_component
from titan_tune.report import memory_charts as charts
from titan_tune.report.blocks import facts, head, source, table, tile
from titan_tune.report.estimate import (
    NO_CHANGE,
    VERDICT_WORDS,
    accounting_title,
    figures,
    job_line,
    needs,
    room,
    suggestion_notes,
    suggestions_title,
)
from titan_tune.report.markup import Markup, el
from titan_tune.report.memory_bars import size, words
from titan_tune.units import GIB

GENERATOR: Final = "titan-tune estimate"
TRACE: Final = "trace"
VERDICT_CLASS: Final = {Verdict.FITS: "good", Verdict.PRESSURE: "warn", Verdict.DOES_NOT_FIT: "bad"}

CSS: Final = """
.part.parameters { fill: #0072b2; } .part.gradients { fill: #cc79a7; } .part.optimizer { fill: #56b4e9; }
.part.activations { fill: #009e73; } .part.attention_scores { fill: #d55e00; } .part.logits_loss { fill: #e69f00; }
.part.gathered_parameters { fill: #f0e442; } .part.other { fill: #999; }
.part { stroke: var(--ground); stroke-width: 1; }
svg text.on { fill: #000; font-weight: 600; } svg text.on.parameters { fill: #fff; }
svg text.strong { fill: var(--ink); font-weight: 600; }
.band { fill: var(--ink); opacity: .05; } .area { fill: var(--main); fill-opacity: .18; stroke: var(--main); }
.verdict.good { color: var(--good); } .verdict.warn { color: var(--base); } .verdict.bad { color: var(--bad); }
td.lines code { display: block; } h1 small { font-weight: 400; }
.rows li { grid-template-columns: minmax(7rem, 16%) 1fr 10.5rem; }
@media (max-width: 42rem) { .rows li { grid-template-columns: 1fr 9rem; } .rows .across {
  grid-column: 1 / -1; grid-row: 2; } .rows .name { grid-column: 1; } td.wide { min-width: 12rem; } }
"""


def render_memory_html(answer: Answer, job_name: str) -> str:
    """The whole page, of a valid or an invalid job."""
    sections = _invalid(answer) if answer.memory is None else _sections(answer, answer.memory)
    nav = el("nav", *(el("a", title, href=f"#{name}") for name, title, _ in sections), aria_label="Contents")
    about = f"{job_name}: {job_line(answer.settings)} · torchtitan 0.2.2 · by {answer.method}"
    body = el(
        "main",
        el("header", el("p", about), _headline(answer), nav),
        *(el("section", el("h2", title), *blocks, id=name) for name, title, blocks in sections),
    )
    start = head(f"{job_name}: memory", generator=GENERATOR, css=CSS)
    return f"<!doctype html>\n{el('html', start, el('body', body), lang='en')}\n"


Sections = list[tuple[str, str, list[str]]]


def _sections(answer: Answer, memory: MemoryEstimate) -> Sections:
    made: Sections = [
        ("answer", "The answer", _answer(answer, memory)),
        ("stages", "What fills the card", _stages(answer, memory)),
        ("components", "Components of the peak", [_components(answer.settings, memory)]),
        ("phases", "Phases of the step", _phases(memory)),
    ]
    if answer.traces:
        made.append(("timeline", "Memory over the step", _timelines(answer, memory)))
    if answer.suggestions:
        made.append(("suggestions", suggestions_title(answer, memory), _suggestions(answer)))
    if answer.accounting is not None:
        made.append(("accounting", "The rule of thumb beside it", _accounting(answer.accounting)))
    made.append(
        ("warnings", "Warnings", _findings(answer.warnings, "No rule has anything against this job."))
    )
    made.append(("assumptions", "Assumptions", [el("ul", *(el("li", text) for text in answer.assumptions))]))
    return made


def _invalid(answer: Answer) -> Sections:
    return [
        ("invalid", "Why torchtitan cannot run it", _findings(answer.invalid, "")),
        ("warnings", "Warnings", _findings(answer.warnings, "No rule warns of anything else.")),
    ]


def _headline(answer: Answer) -> Markup:
    memory = answer.memory
    if memory is None:
        return el("h1", el("span", "invalid", class_="verdict bad"), ": torchtitan does not run this job")
    word = VERDICT_WORDS[memory.verdict][0]
    return el("h1", el("span", word, class_=f"verdict {VERDICT_CLASS[memory.verdict]}"), f": {room(memory)}")


def _kind(memory: MemoryEstimate) -> str:
    return "computed" if memory.method == TRACE else "predicted"


def _answer(answer: Answer, memory: MemoryEstimate) -> list[str]:
    kind = _kind(memory)
    tiles = []
    for name, value, detail in figures(answer, memory):
        if name == "speed":
            tiles.append(tile("tokens/s per GPU", "predicted", value.partition(" ")[0], detail))
        elif name != "source":
            tiles.append(tile(name, "predicted" if name == "minimum" else kind, value, detail))
    blocks: list[str] = [el("div", *tiles, class_="tiles")]
    found = needs(answer)
    if found:
        blocks += [el("h3", "What it takes"), facts(found)]
    how = (
        "Computed from a trace: the real torchtitan model ran two training steps under fake tensors on a CPU."
        if answer.traces
        else "Predicted by closed forms; nothing was run."
    )
    return [*blocks, el("p", how, " ", source(kind), class_="soft")]


def _limit(memory: MemoryEstimate) -> float:
    return memory.capacity_bytes - memory.outside_bytes


def _stages(answer: Answer, memory: MemoryEstimate) -> list[str]:
    many = len(memory.stages) > 1
    rows = [
        charts.Bar(
            f"stage {stage.stage}" if many else "peak",
            by_component(stage.peak.items),
            f"in {words(stage.peak.name)}",
            many and stage.stage == memory.worst_stage,
        )
        for stage in memory.stages
    ]
    intro = (
        f"Peak active memory by component, bytes that are in use at once. The dashed line is {size(_limit(memory))}: "
        f"the card's {size(memory.capacity_bytes)} less {size(memory.outside_bytes)} outside the allocator (CUDA "
        "context, cuBLAS, NCCL)."
    )
    if answer.settings.dims.pp > 1:
        intro += " A stage is a pipeline rank with all its model parts; the worst decides."
    present = [name for name in COMPONENTS if any(row.parts[name] > 0 for row in rows)]
    return [el("p", intro), charts.legend(present), charts.bars(rows, limit_bytes=_limit(memory))]


def _components(settings: Settings, memory: MemoryEstimate) -> Markup:
    explained = _explained(settings)
    rows: list[Sequence[str]] = []
    for name, held in sorted(memory.components.items(), key=lambda item: -item[1]):
        if held > 0:
            what, origin = explained[name]
            share = f"{100 * held / memory.active_bytes:.1f} %"
            where = el("td", origin, class_="wide")
            rows.append(
                (
                    words(name),
                    f"{held / GIB:.2f}",
                    f"{held:,.0f}",
                    share,
                    el("td", what, class_="wide"),
                    where,
                )
            )
    total = memory.active_bytes
    rows.append((el("th", "in all", scope="row"), f"{total / GIB:.2f}", f"{total:,.0f}", "100 %", "", ""))
    return table(("component", "GiB", "bytes", "share", "what it is", "where it comes from"), rows)


def _explained(s: Settings) -> Mapping[str, tuple[str, str]]:
    """What each component is, and what of the job decides it."""
    size_bytes = 2 if s.dtype == "bfloat16" else 4
    dims = s.dims
    degrees = (("FSDP", dims.fsdp_degree), ("TP", dims.tp), ("PP", dims.pp))
    cut = "".join(f" ÷ {degree} ({name})" for name, degree in degrees if degree > 1) or "; not sharded"
    batch = s.pipeline.microbatch_size if dims.pp > 1 else s.local_batch_size
    tokens = f"{batch} × {s.seq_len // dims.cp:,} tokens"
    blocks = f"{tokens} × {s.model.n_layers} layers"
    if dims.pp > 1:
        blocks = f"{tokens} × this rank's layers × microbatches in flight ({s.pipeline.schedule})"
    ac = s.ac.mode.value
    if s.ac.mode is AcMode.SELECTIVE:
        ac += f' "{s.ac.every or "op"}"'
    compiled = "compiled" if s.compile.loss else "eager"
    return {
        "parameters": (f"{s.dtype} master weights of this rank", f"{size_bytes} bytes a parameter{cut}"),
        "gradients": (
            "gradients that exist at the peak, and buffers that reduce them",
            f"{size_bytes} bytes a parameter when all are there{cut}",
        ),
        "optimizer": (f"{s.optimizer}'s two moments, {s.dtype}", f"{2 * size_bytes} bytes a parameter{cut}"),
        "activations": (
            "what the blocks saved for backward, and what one block's backward works with",
            f"{blocks}; activation checkpointing {ac}; blocks {'compiled' if s.compile.model else 'eager'}",
        ),
        "attention_scores": (
            "S × S matrices of attention without a fused kernel",
            f"sequence {s.seq_len:,}, squared; float32 attention or an old GPU",
        ),
        "logits_loss": (
            "logits, their float32 copies and gradients",
            f"{tokens} × vocabulary {s.model.vocab_size:,}; {compiled} loss",
        ),
        "gathered_parameters": (
            "whole weights in the compute dtype, gathered or cast for a moment",
            f"blocks and output weight in {s.mixed_precision_param}; reshard_after_forward {s.reshard_after_forward}",
        ),
        "other": ("inputs, RoPE table, cuBLAS workspaces, scratch", "fixed, a few hundred MiB at most"),
    }


def _phases(memory: MemoryEstimate) -> list[str]:
    stage = next(s for s in memory.stages if s.stage == memory.worst_stage)
    where = f"Stage {stage.stage}, the worst. " if len(memory.stages) > 1 else ""
    traced = memory.method == TRACE
    rows = []
    for phase in stage.phases:
        parts = by_component(phase.items)
        largest = sorted((n for n in parts if parts[n] > 0), key=lambda n: -parts[n])[:3]
        holds = "" if traced else ", ".join(f"{words(n)} {size(parts[n])}" for n in largest)
        name = words(phase.name)
        shown = el("td", el("strong", name)) if phase.name == stage.peak.name else name
        line = (shown, f"{phase.total_bytes / GIB:.2f}", f"{phase.total_bytes:,.0f}")
        rows.append(line if traced else (*line, el("td", holds, class_="wide")))
    names: tuple[str, ...] = ("phase", "GiB", "bytes")
    intro = f"{where}The peak is the largest phase, not their sum. "
    if traced:
        return [el("p", intro, "Highest active memory in each."), table(names, rows)]
    chart = [
        charts.Bar(words(p.name), by_component(p.items), "", p.name == stage.peak.name) for p in stage.phases
    ]
    present = [n for n in COMPONENTS if any(bar.parts[n] > 0 for bar in chart)]
    return [
        el("p", intro, "Only moments that can be a peak are listed, in the order of the step."),
        charts.legend(present),
        charts.bars(chart, limit_bytes=_limit(memory)),
        table((*names, "most of it"), rows),
    ]


def _timelines(answer: Answer, memory: MemoryEstimate) -> list[str]:
    intro = (
        "Active memory over the second traced step, the steady state: across, every allocation and release in "
        "order (not time)."
    )
    blocks: list[str] = [el("p", intro, " ", source("computed"))]
    for stage, trace in zip(memory.stages, answer.traces, strict=True):
        label = f"stage {stage.stage} (rank {trace.rank})" if len(answer.traces) > 1 else f"rank {trace.rank}"
        points = charts.last_step(trace.timeline)
        if len(answer.traces) > 1:
            blocks.append(el("h3", label))
        blocks.append(
            charts.timeline(points, limit_bytes=_limit(memory), label=f"Active memory over a step, {label}")
        )
    top = max(trace.active_bytes for trace in answer.traces)
    if _limit(memory) > charts.FAR_ABOVE * top:
        blocks.append(
            el("p", f"The card's {size(memory.capacity_bytes)} lie far above the chart.", class_="soft")
        )
    return blocks


def _suggestions(answer: Answer) -> list[str]:
    rows = []
    for s in answer.suggestions:
        change: list[str] = [el("code", line) for line in s.lines] or [NO_CHANGE]
        rows.append((
            el("td", *change, class_="lines wide"), str(s.gpus), size(s.memory.active_bytes),
            size(s.memory.device_bytes), f"{s.tokens_per_second_per_gpu:,.0f}",
            ", ".join(suggestion_notes(answer.settings, s)),
        ))  # fmt: skip
    intro = "Each line is one way; fewest GPUs first, then the fastest. Figures by formula. "
    names = ("what to change", "GPUs", "active", "device", "tokens/s/GPU", "")
    return [el("p", intro, source("predicted")), table(names, rows)]


def _accounting(found: Accounting) -> list[str]:
    intro = "Parameters, gradients and optimizer only, in decimal GB, as people quote them. No activations."
    blocks: list[str] = [el("p", intro)]
    names = ("component", "dtype", "bytes/parameter", "GB in all", "GB a GPU")
    for part in (found.quoted, found.mixed, found.held):
        rows = [
            (
                line.component,
                line.dtype,
                f"{line.bytes_per_parameter:g}",
                *_gb(line.total_bytes, line.rank_bytes),
            )
            for line in part.lines
        ]
        total = (f"{part.bytes_per_parameter:g}", *_gb(part.total_bytes, part.rank_bytes))
        rows.append((el("th", "in all", scope="row"), "", *total))
        blocks += [el("h3", accounting_title(part, found.world_size)), table(names, rows)]
    return [*blocks, el("ul", *(el("li", note) for note in found.notes))]


def _gb(total_bytes: float, rank_bytes: float | None) -> tuple[str, str]:
    return f"{total_bytes / GB:,.1f}", "" if rank_bytes is None else f"{rank_bytes / GB:,.1f}"


def _findings(found: Sequence[Finding], nothing: str) -> list[str]:
    if not found:
        return [el("p", nothing)]
    return [
        el(
            "div",
            el("p", finding.message, " ", el("code", finding.rule)),
            *([el("p", "Fix: ", finding.fix)] if finding.fix else []),
            class_="note",
        )
        for finding in found
    ]
