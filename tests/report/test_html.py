import re
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.report.studies import AXES, BASE, CPU, full_study, info, record, report
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import ProbeStatus
from titan_tune.report.blocks import POLICY
from titan_tune.report.html import render_html
from titan_tune.report.markup import VOID, Markup, el
from titan_tune.study.records import Role

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "</style><svg/onload=alert(1)>",
    "</title><h1>x",
    "&lt;b&gt; &amp;",
    "-->\x00\x1b[31m\ud800 \u202eevil",
    "javascript:alert(1)",
]
SECTIONS = ["answer", "price", "configurations", "progress", "predictions", "axes", "trials", "trend", "rejected",
            "failed", "method", "limits"]  # fmt: skip


class Page(HTMLParser):
    """Tags with their attributes in order, text by section, and whether every tag is closed."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.stack, self.text, self.section = [], [], {}, "head"
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["id"]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text[self.section] = self.text.get(self.section, "") + data


def shape(page):
    """Tags and attribute names: what may not depend on the strings of a study."""
    return [(tag, tuple(attrs)) for tag, attrs in Page(page).tags]


def study_with(word):
    """A study that holds the word wherever a string can come from outside."""
    axes = {f"axis {word}": [f"a {word}", f"b {word}"]}
    axis, (one, other) = next(iter(axes.items()))
    study_info = info(
        axes=axes,
        numerics_axes=[axis],
        job_name=f"job {word}",
        rejected={f"rule {word}": 3},
        rejection_examples={f"rule {word}": f"example {word}"},
        environment={"gpu": f"gpu {word}", "packages": {f"torch {word}": f"2 {word}"}, "driver": f"d {word}"},
        created=f"2026 {word}",
    )
    records = [
        record(0, {axis: one}, 100.0, role=Role.BASELINE, predicted=90.0, predicted_active_gib=55.0,
               warnings=(f"warning {word}",)),
        record(1, {axis: other}, 120.0, predicted=130.0, predicted_active_gib=65.0),
        record(2, {axis: one}, status=ProbeStatus.HANG, message=f"message {word}",
               details={f"key {word}": f"value {word}"}),
    ]  # fmt: skip
    return report(study_info, records, study=f"study {word}")


def test_all_sections_are_there_in_order():
    page = Page(render_html(report(*full_study())))
    assert [attrs["id"] for tag, attrs in page.tags if tag == "section"] == SECTIONS
    assert page.stack == []


def test_the_answer_is_on_the_page():
    text = Page(render_html(report(*full_study()))).text
    assert "8,350" in text["answer"] and "+30.4 %" in text["answer"] and "74.8 GiB" in text["answer"]
    assert "This changes numerics: float8: off → rowwise." in text["answer"]
    assert "titan-tune export llama3-8b -o best.toml" in text["answer"]
    assert "gain ÷ (1 + gain)" in text["price"]
    assert "needs 187.2 GiB" in text["rejected"]
    assert "no step for 300 s" in text["failed"]
    assert "torchtitan 0.2.2" in text["method"] and "global batch of 64 sequences" in text["method"]


def test_every_trial_and_every_configuration_has_its_line():
    data = report(*full_study())
    page = Page(render_html(data))
    assert all(trial.folder in page.text["trials"] for trial in data.trials)
    rows = [
        attrs for tag, attrs in page.tags if tag == "svg" and "95 % interval" in attrs.get("aria-label", "")
    ]
    assert len(rows) == len(data.configurations)


def test_what_colour_says_words_and_shapes_say_too():
    page = Page(render_html(report(*full_study())))
    text = page.text["configurations"]
    for mark in ("best", "job as it was", "finals", "changes numerics"):
        assert mark in text
    kinds = {attrs["class"] for tag, attrs in page.tags if attrs.get("class", "").startswith("mark")}
    assert {"mark baseline", "mark final", "mark probe", "mark failed"} <= kinds


def test_the_page_loads_nothing_and_runs_nothing():
    page = render_html(report(*full_study()))
    for tag, attrs in Page(page).tags:
        assert tag not in {"script", "img", "link", "iframe", "object", "embed", "form", "use", "image"}
        assert not any(name.startswith("on") or name in {"src", "srcset", "style"} for name in attrs)
        assert attrs.get("href", "#").startswith("#")
    assert "url(" not in page and "@import" not in page and "://" not in page
    assert f'content="{POLICY}"'.replace("'", "&#x27;") in page


def test_light_dark_phone_and_paper_are_provided_for():
    page = render_html(report(*full_study()))
    for rule in ("prefers-color-scheme: dark", "max-width: 42rem", "@media print", "width=device-width"):
        assert rule in page


@pytest.mark.parametrize("word", HOSTILE)
def test_strings_of_a_study_stay_text(word):
    page = render_html(study_with(word))
    assert shape(page) == shape(render_html(study_with("plain")))
    page.encode("utf-8")
    shown = Page(page).text
    if word.isprintable():
        for section in ("trials", "trend", "rejected", "failed", "method", "limits"):
            assert word in shown[section]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(word=st.text(max_size=40))
def test_no_string_changes_the_shape_of_the_page(word):
    assert shape(render_html(study_with(word))) == PLAIN


PLAIN = shape(render_html(study_with("plain")))


@given(text=st.text(), name=st.sampled_from(["title", "aria_label"]))
def test_elements_escape_text_and_attributes(text, name):
    parser = Page(el("p", text, **{name: text}))
    assert [tag for tag, _ in parser.tags] == ["p"] and parser.stack == []
    assert list(parser.tags[0][1]) == [name.replace("_", "-")]


def test_only_markup_goes_in_as_it_is():
    assert el("p", Markup("<b>x</b>"), "<b>") == "<p><b>x</b>&lt;b&gt;</p>"


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "There is no result: no probe has finished."),
        ([record(0, BASE, role=Role.BASELINE, message="too big")],
         "There is no result: the only probe was not measured."),
        ([record(0, BASE, role=Role.BASELINE), record(1, BASE | {"compile": "default"}, status=ProbeStatus.TIMEOUT)],
         "There is no result: none of 2 probes was measured."),
        ([record(0, BASE, 100.0, role=Role.BASELINE)],
         "Only the job as it was has been measured: 100 tokens/s per GPU."),
        ([record(0, BASE, 100.0)], "the job as it was has no measurement to compare."),
        ([record(0, {}, 100.0, role=Role.BASELINE)], "Only the job as it was has been measured"),
    ],
)  # fmt: skip
def test_poor_studies_render_and_say_so(records, says):
    page = render_html(report(info(), records))
    assert [attrs["id"] for tag, attrs in Page(page).tags if tag == "section"] == SECTIONS
    heading = re.search("<h1>(.*?)</h1>", page)[1]
    assert says in heading
    assert "nan" not in page.lower().replace("titan-tune", "") and "inf " not in page


def test_a_study_on_cpu_processes_says_what_its_figures_are_worth():
    study_info = info(cluster=ClusterSpec(gpu=CPU, gpus_per_node=2), device="cpu", environment={})
    records = [record(0, BASE, 51.3, role=Role.BASELINE, memory_kind="rss")]
    text = Page(render_html(report(study_info, records))).text
    assert "tokens/s per process" in text["answer"] and "resident set size" in text["answer"]
    assert "say nothing about GPUs" in text["limits"]
    assert "not recorded" in text["method"]


def test_axes_of_the_space_are_listed_with_those_that_change_numerics():
    text = Page(render_html(report(*full_study()))).text["method"]
    assert all(axis in text for axis in AXES)
    assert "float8 changes numerics" in text
