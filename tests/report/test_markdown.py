import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tests.report.studies import BASE, full_study, info, record, report
from tests.report.test_html import HOSTILE, study_with
from titan_tune.report.markdown import MARKER, fenced, inline, render_markdown, table, text
from titan_tune.report.markup import clean
from titan_tune.study.records import Role

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
ALLOWED_INLINE = {"text", "softbreak", "text_special"}


def plain(value):
    return " ".join(clean(value).split())


def blocks(markdown):
    """Block tokens by type, without their text."""
    return [token.type for token in PARSER.parse(markdown)]


def content(token):
    """What a reader sees of an inline token; fails for anything but text."""
    assert {child.type for child in token.children} <= ALLOWED_INLINE, token.content
    return "".join(child.content for child in token.children)


def cells(markdown):
    tokens = PARSER.parse(markdown)
    return [content(tokens[i + 1]) for i, token in enumerate(tokens) if token.type in ("th_open", "td_open")]


def test_sections_hardware_date_and_versions_are_there():
    page = render_markdown(report(*full_study()))
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[0] == "## The answer" and headings[-1] == "## Limits" and len(headings) == 12
    for fact in (
        "8 × NVIDIA H200",
        "2026-11-03",
        "2026-11-02",
        "torch 2.11.0",
        "torchtitan 0.2.2",
        "8,350",
        "+30.4 %",
    ):
        assert fact in page
    assert page.startswith(MARKER) and page.endswith("\n")


def test_every_table_has_as_many_cells_in_each_row():
    tokens = PARSER.parse(render_markdown(report(*full_study())))
    counts, row = [], None
    for token in tokens:
        if token.type == "table_open":
            counts.append(set())
        elif token.type == "tr_open":
            row = 0
        elif token.type in ("th_open", "td_open"):
            row += 1
        elif token.type == "tr_close":
            counts[-1].add(row)
    assert len(counts) >= 10 and all(len(widths) == 1 for widths in counts)


@given(value=st.text())
def test_a_cell_holds_any_text_as_it_is(value):
    found = cells(table(("name", "value"), [(value, "after")]))
    assert found == ["name", "value", plain(value), "after"]


@given(value=st.text(alphabet="\\|`*_[]<>&#!~$-+=1.) ahtps:/w\n", max_size=30))
def test_a_cell_holds_text_made_of_markup_as_it_is(value):
    assert cells(table(("n", "v"), [(value, "after")]))[2:] == [plain(value), "after"]


@given(value=st.text(alphabet="\\|`*_[]<>&#!~$-+=1.) ahtps:/w\n", min_size=1, max_size=30))
def test_a_paragraph_stays_a_paragraph(value):
    if not plain(value):
        return
    tokens = PARSER.parse(text(value))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert content(tokens[1]) == plain(value)


@pytest.mark.parametrize(
    "value", ["see https://evil.example/x", "HTTP://x.y", "www.evil.example", "mailto:a@b.c"]
)
def test_addresses_do_not_become_links(value):
    escaped = inline(value)
    # what GitHub's autolink extension looks for
    assert not re.search(r"(?i)(https?|ftp)://|mailto:|www\.", escaped)
    assert PARSER.render(escaped) == f"<p>{value}</p>\n"


@given(value=st.text(alphabet="`~ab\n", max_size=30))
def test_a_code_block_cannot_be_ended_from_inside(value):
    tokens = PARSER.parse(fenced(value) + "\n\nafter\n")
    assert [t.type for t in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]


PLAIN = blocks(render_markdown(study_with("plain")))


@pytest.mark.parametrize("word", HOSTILE)
def test_strings_of_a_study_stay_text(word):
    page = render_markdown(study_with(word))
    page.encode("utf-8")
    assert blocks(page) == PLAIN
    for token in PARSER.parse(page):
        if token.type == "inline":
            content(token)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(word=st.text(max_size=40))
def test_no_string_changes_the_shape_of_the_file(word):
    assert blocks(render_markdown(study_with(word))) == PLAIN


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(0, BASE, role=Role.BASELINE)],
        [record(0, BASE, 100.0, role=Role.BASELINE)],
        [record(0, {}, 1.0)],
    ],
)
def test_poor_studies_render(records):
    page = render_markdown(report(info(), records))
    assert page.count("\n## ") == 12
    assert "None" not in page
