import pytest
from studies import info, record

from titan_tune.domain.probe import ProbeStatus
from titan_tune.report.data import report_data
from titan_tune.report.html import render_html
from titan_tune.report.markdown import render_markdown
from titan_tune.report.timing import REST, where_time_went

CHOICES = {"activation_checkpoint": "none", "compile": "default", "float8": "off", "local_batch_size": "2"}
PHASES = {
    "launch": 1.0, "imports": 9.0, "init": 5.0, "first_step": 40.0, "steps": 20.0, "shutdown": 5.0, "compile": 30.0
}  # fmt: skip


def of(number, *, seconds=80.0, phases=None, **more):
    details = {"phases": phases} if phases else {}
    return record(
        number, {**CHOICES, "local_batch_size": str(number)}, seconds=seconds, details=details, **more
    )


def test_phases_are_summed_and_compilation_follows_the_step_that_it_is_part_of():
    faster = {**PHASES, "imports": 1.0, "compile": 0.0}
    rows = where_time_went(
        [
            of(1, phases=PHASES, tokens_per_second=9000.0),
            of(2, phases=faster, tokens_per_second=9000.0, seconds=72.0),
        ]
    )
    assert [row.seconds for row in rows] == [2.0, 10.0, 10.0, 80.0, 30.0, 40.0, 10.0]
    assert [row.typical for row in rows][:5] == [1.0, 5.0, 5.0, 40.0, 30.0]
    compiled = rows[4]
    assert compiled.name.startswith("compilation")
    assert sum(row.share for row in rows) - compiled.share == pytest.approx(1.0)


def test_what_no_phase_accounts_for_is_a_row_of_its_own():
    rows = where_time_went([of(1, phases=PHASES), of(2, seconds=20.0, status=ProbeStatus.TIMEOUT)])
    assert (rows[-1].name, rows[-1].seconds, rows[-1].typical) == (REST, 20.0, None)
    assert rows[-1].share == pytest.approx(0.2)


def test_records_without_phases_have_no_table():
    data = report_data("s", info(), [of(1, tokens_per_second=9000.0)], made="2026", export_command="x")
    assert data.phases == ()
    assert "Where the time went" not in render_markdown(data) + render_html(data)


def test_both_reports_show_the_table():
    records = [of(1, phases=PHASES, tokens_per_second=9000.0)]
    data = report_data("s", info(), records, made="2026", export_command="x")
    assert "| first step | 40 s | 50.0 % | 40.0 s |" in render_markdown(data)
    page = render_html(data)
    assert 'href="#time"' in page
    assert "compilation, within the first step" in page
    assert all(name != "phases" for name, _ in data.trials[0].details)
