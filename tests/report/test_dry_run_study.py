"""A report never calls measured what a dry run predicts."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from tests.report.studies import (
    BASE,
    DRY_RUN_DETAILS,
    FASTER,
    dry_run,
    dry_run_study,
    full_study,
    info,
    mixed_study,
    record,
    report,
)
from tests.report.test_html import Page
from titan_tune.cli.report import report_json
from titan_tune.cli.search import is_predicted, result_data
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import Origin, ProbeOutcome, ProbeStatus
from titan_tune.report import notes, words
from titan_tune.report.dry_runs import what_it_is
from titan_tune.report.html import render_html
from titan_tune.report.markdown import render_markdown
from titan_tune.report.search import finished_line, summary
from titan_tune.study.budget import Spent
from titan_tune.study.records import Role

GPUS = 256


def drawn(renderable):
    console = Console(width=220, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def sentences_with(text, figure):
    """Lines, and of those the sentences, that show a figure."""
    return [s for line in text.splitlines() for s in re.split(r"(?<=[.;]) ", line) if figure in s]


def every_text(study):
    """What each format shows, tags left out."""
    data = report(*study)
    page = Page(render_html(data).replace("</div>", "</div>\n")).text
    return {
        "markdown": render_markdown(data),
        "html": "\n".join(page.values()),
        "summary": drawn(summary(study[1], world_size=GPUS)),
        "line": drawn(finished_line(study[1][1], "label")),
    }


@pytest.mark.parametrize("format_name", ["markdown", "html", "summary", "line"])
def test_no_format_calls_a_dry_runs_throughput_measured(format_name):
    text = every_text(dry_run_study())[format_name]
    shown = sentences_with(text, "1,384")
    assert shown
    assert not [sentence for sentence in shown if "measured" in sentence.lower()]
    assert "dry run" in text.lower() and "95 %" not in text


@pytest.mark.parametrize("format_name", ["markdown", "html"])
def test_headings_and_method_of_dry_runs(format_name):
    text = every_text(dry_run_study())[format_name]
    for title in (
        "Every configuration, by dry run",
        "Formula against dry run",
        "Every dry run",
        "How the dry runs were made",
    ):
        assert title in text
    for wrong in (
        "measured configuration",
        "Predicted against measured",
        "How it was measured",
        "measured probe",
    ):
        assert wrong not in text


def test_the_answer_says_what_a_dry_run_is_and_what_it_assumes():
    data = report(*dry_run_study())
    assert words.headline(data).startswith(
        "Dry runs predict that the best configuration trains 125.4 % faster"
    )
    assert "(614 tokens/s per GPU, dry run)" in words.gain_sentence(data, data.answer)
    assert (
        words.interval_note(data.answer) == "The interval is assumed (± 8 %), not found from repeated runs."
    )
    assert "measured on the ranks that ran" in words.memory_sentence(data, data.answer.memory)
    page = render_markdown(data)
    assert "one rank of the job's 256, alone on one GPU" in page
    assert "pipeline bubble from its schedule" in page and "llama3\\_8b.toml for" in page.replace(
        "3_8", "3\\_8"
    )
    assert not any("95 %" in line or "loss of its few" in line for line in notes.limits(data))
    assert any("No run on all 256 GPUs confirms" in line for line in notes.limits(data))


def test_assumptions_follow_the_dry_runs():
    ranks = [{"rank": 0, "pipeline_rank": 0}, {"rank": 64, "pipeline_rank": 1}]
    details = {
        "dry_run": DRY_RUN_DETAILS["dry_run"] | {"gpu": "h100", "ranks": ranks, "relative_interval": 0.25}
    }
    cluster = ClusterSpec(gpu=info().cluster.gpu, gpus_per_node=8, num_nodes=32)
    values = {"parallelism.expert_parallel_degree": 8}
    other = report(
        info(cluster=cluster, environment={"gpu": "NVIDIA H100"}),
        [
            dry_run(0, BASE, 600.0, role=Role.BASELINE),
            dry_run(1, FASTER, 900.0, details=details, values=values),
        ],
    )
    note = what_it_is(other.method.dry_runs)
    assert "up to 2 ranks" in note and "(h100, h200)" in note and "ratio of the two" in note
    assert "ranks that did not run" in note and "same number of tokens" in note
    assert other.method.hardware == "32 nodes × 8 × h200"
    assert other.method.dry_runs.intervals == (0.08, 0.25)
    plain = what_it_is(report(*dry_run_study()).method.dry_runs)
    assert "ratio" not in plain and "did not run" not in plain and "expert" not in plain


def test_dry_runs_cost_one_gpu_and_the_break_even_is_of_the_job():
    data = report(*dry_run_study())
    price, gain = data.price, data.answer.gain
    spent = sum(t.seconds for t in data.trials) / 3600
    assert price.gpu_hours == pytest.approx(spent) and price.dry_runs == 3
    saved = price.break_even.hours * GPUS * (1 - 1 / (1 + gain))
    assert saved == pytest.approx(spent)
    text = words.price_sentence(data)
    assert text.startswith("3 dry runs") and "one GPU for each rank that ran" in text
    assert "on 256 GPUs" not in text
    assert words.break_even_sentence(data).startswith("If the gain is what dry runs predict")
    assert "GPUs of the job" in words.break_even_formula(data)
    assert "GPU-hours" in drawn(summary(dry_run_study()[1], world_size=GPUS))
    assert Spent.of(dry_run_study()[1], world_size=GPUS, wall_seconds=0.0).gpu_seconds == pytest.approx(
        spent * 3600
    )


@pytest.mark.parametrize(
    ("details", "measured", "seconds", "origin"),
    [
        ({}, False, 10.0 * GPUS, Origin.MEASURED),
        ({}, True, 10.0, Origin.DRY_RUN),
        ({"gpu_seconds": 17.0}, True, 17.0, Origin.DRY_RUN),
        ({"gpu_seconds": 17.0}, False, 17.0, Origin.DRY_RUN),
        ({"simulated_rank": 3}, False, 10.0, Origin.DRY_RUN),
        ({"phase": "step"}, False, 10.0 * GPUS, Origin.MEASURED),
    ],
)
def test_gpu_seconds_of_an_outcome(details, measured, seconds, origin):
    found = dry_run(0, BASE, 1.0).measurement if measured else None
    status = ProbeStatus.COMPLETED if measured else ProbeStatus.OOM
    outcome = ProbeOutcome(status, "", 10.0, found, details)
    assert outcome.gpu_seconds(GPUS) == seconds and outcome.origin is origin


def test_a_mixed_study_marks_each_row():
    data = report(*mixed_study())
    assert {c.tokens_per_second: "dry run" in c.marks for c in data.configurations} == {
        1384.0: True,
        700.0: False,
        600.0: False,
    }
    assert [t.ended for t in data.trials] == ["completed", "completed", "completed, dry run"]
    page = render_markdown(data)
    assert "measured or by dry run" in page and "#2 (dry run)" in page and "#1 |" in page
    assert not [s for s in sentences_with(page, "1,384") if "measured" in s and "which was measured" not in s]
    text = words.price_sentence(data)
    assert text.startswith("2 probes and 1 dry run (3 completed)")
    assert data.price.gpu_hours == pytest.approx((2 * 90 * GPUS + 90) / 3600)


def test_a_gain_across_origins_says_so():
    above, below = report(*mixed_study()), report(*mixed_study(best_is_dry=False))
    assert words.headline(above) == (
        "A dry run predicts that the best configuration reaches 1,384 tokens/s per GPU, +130.7 % over the job as it"
        " was, which was measured."
    )
    assert "one throughput is from dry runs" in words.gain_sentence(above, above.answer)
    assert "(600 tokens/s per GPU, measured)" in words.gain_sentence(above, above.answer)
    assert words.headline(below).startswith("The best measured configuration trains")
    assert is_predicted(mixed_study()[1]) and not is_predicted(mixed_study(best_is_dry=False)[1])


def test_the_predictions_of_a_mixed_study_are_judged_by_what_was_measured():
    data = report(*mixed_study())
    assert len(data.throughput.points) == 3 and data.throughput.compared == 2
    assert data.throughput.median_error == pytest.approx((0.10 + 0.05) / 2)
    assert "over 2 measured configurations" in words.error_sentence(data, memory=False)


def test_effects_never_pair_a_dry_run_with_a_measurement():
    data = report(*mixed_study())
    assert [(e.before, e.after, e.origin) for e in data.effects] == [
        ("selective op", "full", Origin.MEASURED)
    ]
    dry = report(*dry_run_study()).effects
    assert [(e.before, e.after, e.origin) for e in dry] == [("selective op", "none", Origin.DRY_RUN)]


def test_json_has_the_origin_of_every_trial_and_of_the_best():
    _, records = mixed_study()
    data = result_data("s", tuple(records), "")
    assert data["best"]["origin"] == "dry run" and data["best"]["gain_origin"] == "dry run"
    assert [t["origin"] for t in data["trials"]] == ["measured", "measured", "dry run"]
    plain = report_json(report(*mixed_study()), files=())
    assert plain["answer"]["origin"] == "dry run" and plain["answer"]["baseline_origin"] == "measured"
    assert [t["origin"] for t in plain["trials"]] == ["measured", "measured", "dry run"]


def test_the_terminal_names_dry_runs_and_what_they_are():
    text = drawn(summary(dry_run_study()[1], world_size=GPUS))
    assert "assumed interval" in text and "communication and pipeline bubble are computed" in " ".join(
        text.split()
    )
    assert "1,384 tokens/s per GPU, dry run, predicted gain" in text and "3 dry runs" in text
    assert "dry run failed: #2 oom" in text and "not measured" not in text
    mixed = drawn(summary(mixed_study()[1], world_size=GPUS))
    assert re.search(r"1,384 │ +dry run", mixed) and re.search(r"700 │ +measured", mixed)
    assert "2 probes and 1 dry run" in mixed


def test_a_study_without_dry_runs_does_not_speak_of_them():
    data = report(*full_study())
    for text in (render_markdown(data), "\n".join(Page(render_html(data)).text.values())):
        assert "dry run" not in re.sub(r"\.tag[^}]*}|\.mark[^}]*}", "", text.lower())
    assert "dry run" not in drawn(summary(full_study()[1])).lower()


def test_dry_runs_without_a_baseline_or_a_result_say_so():
    study_info, records = dry_run_study()
    alone = report(study_info, records[1:2])
    assert words.headline(alone).startswith("A dry run predicts that the best configuration reaches 1,384")
    assert "has no dry run that gave a throughput" in words.gain_sentence(alone, alone.answer)
    nothing = report(study_info, records[2:])
    assert words.headline(nothing) == "There is no result: of 1 dry run none gave a throughput."
    assert "No dry run gave a throughput." in render_markdown(nothing)
    base = report(study_info, records[:1])
    assert (
        words.headline(base) == "Only the job as it was had a dry run, which predicts 614 tokens/s per GPU."
    )
    slower = report(study_info, [records[0], dry_run(1, FASTER, 500.0)])
    assert "nothing that was tried beats" in words.headline(slower)
    close = report(study_info, [records[0], dry_run(1, FASTER, 620.0)])
    assert words.headline(close).endswith("the two cannot be told apart.")


def test_a_failed_dry_run_does_not_show_its_details_as_text():
    failed = dataclasses.replace(record(2, BASE).outcome, details=DRY_RUN_DETAILS)
    data = report(info(), [dataclasses.replace(record(2, BASE), outcome=failed)])
    assert data.trials[0].origin is Origin.DRY_RUN
    assert "relative_interval" not in render_html(data)
