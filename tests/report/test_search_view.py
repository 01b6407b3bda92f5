"""What a search shows: live, in a pipe, and at the end."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.report.studies import full_study
from tests.study.test_search import small_plan
from titan_tune.domain.probe import ProbeOutcome, ProbeProgress, ProbeStatus
from titan_tune.report.search import PlainView, finished_line, make_view, picture, plan_view, summary
from titan_tune.space.axes import Budget
from titan_tune.study.budget import Spent
from titan_tune.study.plan import label_of
from titan_tune.study.records import Role
from titan_tune.study.selection import winner
from titan_tune.study.view import Running, Snapshot


def drawn(renderable, width=120) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def plan():
    return small_plan(budget=Budget(max_probes=12, max_gpu_hours=2.0))


def snapshot(plan, records=()):
    progress = ProbeProgress("step", 7, 25, 51234.0, 33.0)
    running = (Running("AC none, compile default", Role.PROBE, progress),)
    return Snapshot(plan, "exploring", running, tuple(records), Spent(3, 1800.0, 95.0))


def test_the_live_picture_shows_what_runs_the_best_the_rejected_and_the_budget(plan):
    text = drawn(picture(snapshot(plan, full_study()[1])))
    for words in ("running probe", "step 7/25", "51,234 tokens/s", "AC none, compile default", "best so far"):
        assert words in text
    assert "over the job as it is" in text
    assert f"{len(plan.pool)} candidates" in text
    assert all(f"{rule} {count}" in text for rule, count in plan.rejected.most_common(5))
    assert "probes 3/12" in text and "GPU-hours 0.50/2" in text and "wall clock 1 min 35 s" in text


def test_before_the_first_result_there_is_no_best(plan):
    assert "best so far" not in drawn(picture(snapshot(plan)))


def test_the_plan_names_axes_reasons_and_what_changes_numerics():
    plan = small_plan(axes={"float8": ["off", "rowwise"], "local_batch_size": [1, 2]})
    text = drawn(plan_view(plan))
    assert "axis float8" in text and "(changes numerics)" in text
    assert f"{plan.total} combinations" in text and f"{len(plan.pool)} left" in text
    for rule in plan.rejected:
        assert rule in text


def test_the_summary_ranks_marks_the_baseline_and_says_what_failed():
    records = full_study()[1]
    text = drawn(summary(records, numerics_axes=("float8",), world_size=8))
    assert "baseline" in text and "best: " in text and "GPU-hours" in text
    assert "took part in the finals" in text


@pytest.mark.parametrize("width", [80, 111, 112, 200])
def test_the_ranking_has_room_for_every_configuration(width):
    records = full_study()[1]
    text = drawn(summary(records, world_size=8), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    best = winner(records).standing
    words = " ".join(text.replace("│", " ").split())
    assert f"1* {label_of(best.latest.choices)}" in words or width >= 112
    assert f"{best.tokens_per_second:,.0f}" in text and "baseline" in text
    assert "…" not in text.split("took part")[0]


def test_nothing_measured_is_a_line_and_no_empty_table():
    record = replace(full_study()[1][1], outcome=ProbeOutcome(ProbeStatus.OOM, "too large", 3.0))
    cancelled = replace(record, outcome=ProbeOutcome(ProbeStatus.CANCELLED, "stopped by the search", 3.0))
    assert drawn(summary([record, cancelled])).startswith("nothing was measured in 1 probe\n")
    assert drawn(summary([])).startswith("nothing was measured in no probe\n")
    assert "tokens/s" not in drawn(summary([record]))


def test_cancelled_probes_are_not_counted():
    records = full_study()[1]
    ended = ProbeOutcome(ProbeStatus.CANCELLED, "stopped by the search", 0.0)
    more = [*records, replace(records[1], number=99, outcome=ended)]
    price = drawn(summary(records, world_size=8)).split("job as it is")[1].split("GPU-hours")[0]
    assert price in drawn(summary(more, world_size=8))


def test_text_from_a_study_is_never_read_as_markup():
    record = full_study()[1][1]
    hostile = replace(record, choices={"activation_checkpoint": "[/b][red]x"}, outcome=record.outcome)
    assert "[/b][red]x" in drawn(summary([hostile]))
    failed = replace(hostile, outcome=ProbeOutcome(ProbeStatus.OOM, "[bold]no[/x]", 3.0))
    assert "[bold]no[/x]" in drawn(finished_line(failed, "[/y]")) and "[/y]" in drawn(
        finished_line(failed, "[/y]")
    )
    assert "[bold]no[/x]" in drawn(summary([failed]))


def test_long_messages_are_cut_and_the_folder_named():
    record = replace(full_study()[1][1], outcome=ProbeOutcome(ProbeStatus.UNSUPPORTED, "x" * 900, 3.0))
    text = drawn(summary([record]), width=400)
    assert "x" * 160 + "…" in text and "x" * 161 not in text
    assert str(record.directory) in text


def test_a_pipe_gets_plain_lines(plan):
    console = Console(width=200, file=io.StringIO(), color_system=None)
    view = make_view(console)
    assert type(view) is PlainView
    with view:
        view.note("[brackets] stay")
        view.update(snapshot(plan))
        view.update(snapshot(plan))
        view.finished(full_study()[1][0], "AC none")
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "[brackets] stay" and lines[1] == "stage: exploring"
    assert len(lines) == 3 and "tokens/s per GPU" in lines[2]


@pytest.mark.parametrize(
    ("choices", "label"),
    [
        ({}, "base"),
        ({"activation_checkpoint": "none", "parallelism": "dp_shard=2"}, "AC none, dp_shard=2"),
        ({"parallelism.fsdp_reshard_after_forward": "never"}, "fsdp_reshard_after_forward=never"),
    ],
)
def test_labels_are_short(choices, label):
    assert label_of(choices) == label
