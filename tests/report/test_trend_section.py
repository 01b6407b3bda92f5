"""The trend checks as the report shows them."""

from __future__ import annotations

import json

from tests.report.studies import full_study, info, record, report
from tests.report.test_html import Page
from titan_tune.cli.report import report_json
from titan_tune.report.html import render_html
from titan_tune.report.markdown import render_markdown
from titan_tune.study.records import Role
from titan_tune.study.trend import Grade

UNEVEN = {"step_jitter": 0.4, "slow_steps": 2, "alloc_retries": 0, "late_alloc_retries": 0, "ooms": 0}
CHOICES = {"compile": "off"}


def study(**details: object):
    base = record(0, CHOICES, 100.0, role=Role.BASELINE, predicted_active_gib=60.0)
    best = record(1, {"compile": "default"}, 130.0, predicted_active_gib=59.0, details=dict(details))
    return report(info(), [base, best])


def test_every_measured_probe_has_a_line_and_the_best_its_figures():
    data = study(trend=UNEVEN)
    assert [row.number for row in data.trend.rows] == [0, 1]
    assert {check.name: check.grade for check in data.trend.best} == {
        "peak memory": Grade.OK,
        "step time": Grade.FAIL,
        "allocator": Grade.OK,
    }
    page = Page(render_html(data)).text["trend"]
    assert (
        "does not pass every check: fail: step time: the middle 80 % of steps span 40.0 % of the median"
        in page
    )
    markdown = render_markdown(data)
    assert "| step time | fail |" in markdown and "\n- \\#1: fail: step time" in markdown


def test_a_sound_winner_passes():
    data = study(trend=UNEVEN | {"step_jitter": 0.01, "slow_steps": 0})
    assert data.trend.best_problems == ()
    assert "The best configuration passes 3 checks." in Page(render_html(data)).text["trend"]


def test_checks_that_do_not_concern_a_probe_are_dashes():
    markdown = render_markdown(study(trend=UNEVEN))
    assert "| 0 | ok | ok | – |" in markdown


def test_a_whole_study_is_checked_and_is_plain_json():
    data = report(*full_study())
    assert len(data.trend.rows) == sum(t.tokens_per_second is not None for t in data.trials)
    again = json.loads(json.dumps(report_json(data, files=())))
    assert again["trend"]["rows"][0]["grades"]["allocator"] in tuple(Grade)
