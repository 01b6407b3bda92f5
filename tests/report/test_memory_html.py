"""The page of ``estimate --html``: self-contained, escaped, and every figure where it belongs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.test_html import HOSTILE, Page, shape
from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import Verdict
from titan_tune.estimate.accounting import accounting
from titan_tune.estimate.answer import BESIDE_TRACE, Answer, answer, answer_json
from titan_tune.estimate.traced import Traced
from titan_tune.report.blocks import POLICY
from titan_tune.report.estimate import figures, needs, suggestions_title
from titan_tune.report.memory_charts import last_step, timeline
from titan_tune.report.memory_html import render_memory_html
from titan_tune.titan.job import job_from_text
from titan_tune.titan.keys import defaults
from titan_tune.titan.settings import settings_from
from titan_tune.trace import TraceResult
from titan_tune.trace.events import Point
from titan_tune.units import GIB

JOB = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
seq_len = 8192
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
"""
SECTIONS = ["answer", "stages", "components", "phases", "warnings", "assumptions"]


def asked(values: dict[str, Any] | None = None, *, gpu: str = "h100-80gb", gpus: int = 8) -> Answer:
    job = job_from_text(JOB, name="job.toml").with_values(values or {})
    cluster = ClusterSpec(gpu=gpu_spec(gpu), gpus_per_node=gpus)
    return answer(settings_from(job.resolved(), job.model, cluster), job.resolved())


def traced_answer(points: tuple[Point, ...], *, ranks: int = 1) -> Answer:
    plain = asked({"training.local_batch_size": 1})
    memory = plain.memory
    assert memory is not None
    result = TraceResult(
        active_bytes=max(p.active_bytes for p in points), phase="loss_backward", components={"activations": 1},
        phases={"forward": 1}, reserved_bytes=2, allocator="expandable", timeline=points, rank=0, stages=(0,),
        traced_layers=(32,), num_events=9, seconds=3.0, torch_version="2.13.0", assumptions=("all is well",),
    )  # fmt: skip
    stages = tuple(replace(memory.stages[0], stage=rank) for rank in range(ranks))
    memory = replace(memory, method="trace", stages=stages, assumptions=("all is well",))
    traced = Traced(memory, (result,) * ranks)
    return answer(plain.settings, defaults(), trace=lambda: traced)


POINTS = (
    Point(0, "zero_grad", 5 * GIB),
    Point(1, "optimizer", 6 * GIB),
    Point(2, "zero_grad", 7 * GIB),
    Point(3, "forward", 20 * GIB),
    Point(4, "loss_backward", 30 * GIB),
    Point(5, "backward.3", 25 * GIB),
    Point(6, "step_end", 7 * GIB),
)


def test_sections_of_a_job_that_does_not_fit() -> None:
    found = asked()
    page = Page(render_memory_html(found, "job.toml"))
    assert [dict(a)["id"] for tag, a in page.tags if tag == "section"] == [
        *SECTIONS[:4], "suggestions", *SECTIONS[4:],
    ]  # fmt: skip
    assert page.stack == []
    memory = found.memory
    assert memory is not None and memory.verdict is Verdict.DOES_NOT_FIT
    assert "does not fit" in page.text["head"]
    assert f"{memory.active_bytes / GIB:.1f} GiB" in page.text["answer"]
    for suggestion in found.suggestions:
        assert all(line in page.text["suggestions"] for line in suggestion.lines)
        assert f"{suggestion.memory.active_bytes / GIB:.1f} GiB" in page.text["suggestions"]


def test_components_are_in_bytes_and_add_up() -> None:
    found = asked({"training.local_batch_size": 1})
    assert found.memory is not None
    text = render_memory_html(found, "job.toml")
    section = text[text.index('id="components"') : text.index('id="phases"')]
    sizes = [int(n.replace(",", "")) for n in re.findall(r">(\d{1,3}(?:,\d{3})+)<", section)]
    assert sizes[-1] == round(found.memory.active_bytes)
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=len(sizes))


def test_page_loads_nothing_and_runs_nothing() -> None:
    text = render_memory_html(asked(), "job.toml")
    tags = Page(text).tags
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}) in tags
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not re.search(r"(?:src|href)=\"(?!#)", text)


@pytest.mark.parametrize("word", HOSTILE)
def test_names_from_outside_cannot_add_markup(word: str) -> None:
    found = asked({"training.local_batch_size": 1})
    model = found.settings.model.model_copy(update={"flavor": word})
    hostile = replace(found, settings=replace(found.settings, model=model))
    assert shape(render_memory_html(hostile, word)) == shape(render_memory_html(found, "job.toml"))


def test_each_pipeline_stage_has_its_bar() -> None:
    page = Page(
        render_memory_html(
            asked({"parallelism.pipeline_parallel_degree": 4, "training.local_batch_size": 8}), "job.toml"
        )
    )
    assert all(f"stage {stage}" in page.text["stages"] for stage in range(4))


def test_an_invalid_job_says_why() -> None:
    found = asked({"parallelism.tensor_parallel_degree": 3})
    page = Page(render_memory_html(found, "job.toml"))
    assert found.invalid[0].message in page.text["invalid"]
    assert "invalid" in page.text["head"]


def test_a_trace_draws_its_last_step() -> None:
    found = traced_answer(POINTS)
    page = Page(render_memory_html(found, "job.toml"))
    assert "timeline" in page.text
    assert "30.0 GiB in loss backward" in page.text["timeline"]
    assert "all is well" in page.text["assumptions"]
    two = Page(render_memory_html(traced_answer(POINTS, ranks=2), "job.toml"))
    assert "stage 0" in two.text["timeline"] and "stage 1" in two.text["timeline"]


def test_a_trace_says_what_is_by_formula_all_the_same() -> None:
    fits = traced_answer(POINTS)
    assert fits.memory is not None and fits.minimum is not None
    minimum = next(detail for name, _, detail in figures(fits, fits.memory) if name == "minimum")
    assert minimum.startswith("by formula, ")
    assert BESIDE_TRACE in fits.assumptions and needs(fits) == []
    by_formula = asked()
    assert by_formula.memory is not None and by_formula.suggestions
    tight = replace(by_formula, method="trace", traces=fits.traces)
    assert needs(tight)[-1] == ("by formula", "all of these: only the job itself was traced")
    assert suggestions_title(tight, by_formula.memory) == "What makes it fit, by formula"
    assert suggestions_title(by_formula, by_formula.memory) == "What makes it fit"
    assert "What makes it fit, by formula" in render_memory_html(tight, "job.toml")
    assert answer_json(tight)["advice_method"] == answer_json(by_formula)["advice_method"] == "formula"
    assert BESIDE_TRACE not in by_formula.assumptions


def test_last_step_begins_at_the_last_zero_grad() -> None:
    assert last_step(POINTS) == list(POINTS[2:])
    assert last_step(POINTS[3:]) == list(POINTS[3:])


@given(
    st.lists(
        st.tuples(st.sampled_from(("zero_grad", "forward", "backward.1")), st.integers(0, 200 * GIB)),
        min_size=1,
        max_size=30,
    ).filter(lambda found: any(size for _, size in found)),
    st.integers(1, 300 * GIB),
)
def test_any_timeline_stays_inside_its_chart(found: list[tuple[str, int]], limit: int) -> None:
    points = [Point(place, phase, size) for place, (phase, size) in enumerate(found)]
    text = timeline(points, limit_bytes=limit, label="x")
    path = re.search(r' d="M0 250([^"]+)Z"', text)
    assert path is not None
    numbers = [float(n) for pair in path[1].split("L")[1:] for n in pair.split()]
    assert all(0 <= x <= 1000 for x in numbers[::2])
    assert all(0 <= y <= 250 for y in numbers[1::2])


def test_accounting_section() -> None:
    found = asked({"training.local_batch_size": 1})
    page = Page(render_memory_html(replace(found, accounting=accounting(found.settings)), "job.toml"))
    assert "8 billion parameters" in page.text["accounting"]
    assert "80.0" in page.text["accounting"]  # 10 bytes a parameter of 8 billion
