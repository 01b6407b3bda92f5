"""The terminal view of an estimate in narrow and wide terminals."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import Verdict
from titan_tune.estimate.answer import Answer, answer
from titan_tune.report.estimate import sweep_view, view
from titan_tune.report.memory_bars import BAR_CELLS, Layouts, MemoryBars
from titan_tune.titan.job import job_from_text
from titan_tune.titan.settings import settings_from

JOB = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 8\nseq_len = 8192\n'
WIDTHS = (60, 80, 100, 140)


def asked(gpus: int = 8, gpu: str = "h100-80gb", **values: Any) -> Answer:
    job = job_from_text(JOB, name="job.toml").with_values(
        {key.replace("__", "."): value for key, value in values.items()}
    )
    cluster = ClusterSpec(gpu=gpu_spec(gpu), gpus_per_node=gpus)
    return answer(settings_from(job.resolved(), job.model, cluster), job.resolved())


def printed(shown: RenderableType, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("pp", [1, 4])
def test_bars_are_whole_and_nothing_is_cut_off(width: int, pp: int) -> None:
    memory = asked(parallelism__pipeline_parallel_degree=pp).memory
    assert memory is not None
    lines = printed(MemoryBars(memory), width)
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    bars = lines[: len(memory.stages)]
    for stage, line in zip(memory.stages, bars, strict=True):
        assert line.endswith(f"{stage.active_bytes / 2**30:.1f} GiB in {stage.peak.name.replace('_', ' ')}")
    drawn = [len("".join(re.findall(r"[█▓▒░▚·│]", line))) for line in bars]
    assert max(drawn) <= BAR_CELLS + 1  # the mark where the card ends is one more
    if width >= 100:
        assert max(drawn) >= BAR_CELLS


def test_the_legend_keeps_glyph_name_and_figure_together_and_the_bars_order() -> None:
    memory = asked().memory
    assert memory is not None
    for width in WIDTHS:
        legend = printed(MemoryBars(memory), width)[1:]
        entries = [entry for line in legend for entry in line.split("   ")]
        assert all(re.fullmatch(r"[█▓▒░▚] [a-z ]+ [\d.]+ GiB", entry) for entry in entries), width
        names = [entry[2:].rsplit(" ", 2)[0] for entry in entries]
        assert names[:3] == ["parameters", "optimizer", "activations"]


def test_the_mark_where_the_card_ends_moves_with_the_bar() -> None:
    memory = asked().memory
    assert memory is not None and memory.verdict is Verdict.DOES_NOT_FIT
    for width in WIDTHS:
        bar = printed(MemoryBars(memory), width)[0].split(" ")[1]
        share = bar.index("│") / (len(bar) - 1)
        assert share == pytest.approx(memory.capacity_bytes / memory.active_bytes, abs=0.6 / (len(bar) - 1))


def test_suggestions_are_not_folded_in_mid_word_at_80_columns() -> None:
    found = asked()
    assert found.suggestions
    text = printed(view(found), 80)
    for suggestion in found.suggestions:
        for line in suggestion.lines:
            assert any(shown.startswith(line) for shown in text), line


@pytest.mark.parametrize("width", (80, 100, 140))
def test_a_sweeps_verdict_is_whole(width: int) -> None:
    answers = [(str(batch), asked(training__local_batch_size=batch)) for batch in (1, 64)]
    lines = printed(sweep_view("training.local_batch_size", answers), width)
    assert any(line.startswith("local_batch_size") for line in lines)
    assert any(line.endswith(" fits") for line in lines)
    assert any(line.endswith("does not fit") for line in lines)
    assert ("reserved" in "".join(lines)) == (width >= 100)


def test_the_first_layout_with_room_is_taken() -> None:
    assert printed(Layouts("a" * 50, "b" * 30), 50) == ["a" * 50]
    assert printed(Layouts("a" * 50, "b" * 30), 49) == ["b" * 30]
    assert printed(Layouts("a" * 50, "b" * 30), 10) == ["b" * 10] * 3


def test_a_stage_alone_is_called_peak() -> None:
    memory = asked().memory
    assert memory is not None
    assert printed(MemoryBars(memory), 80)[0].startswith("peak ")
    two = replace(memory, stages=(memory.stages[0], replace(memory.stages[0], stage=1)))
    assert [line[:7] for line in printed(MemoryBars(two), 80)[:2]] == ["stage 0", "stage 1"]
