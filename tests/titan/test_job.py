from __future__ import annotations

import math
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.catalog.loader import flatten
from titan_tune.errors import InputError
from titan_tune.titan.job import Job, job_from_text, load_job, render
from titan_tune.titan.keys import Key, defaults, keys

EXAMPLE = """\
# Llama 3.1 8B, as we train it
[job]
description = "8B"  # shown in the log

[training]
local_batch_size = 2   # sequences
seq_len          = 8192
dataloader.num_workers = 2

[model]
name = "llama3"
flavor = "8B"

# keep the output in bf16
[quantize.linear.float8]
filter_fqns = [
    "output",  # the vocabulary
]
"""


def test_values_defaults_and_model() -> None:
    job = job_from_text(EXAMPLE, name="a.toml")
    assert job.get("training.seq_len") == 8192
    assert job.get("training.dataloader.num_workers") == 2
    assert job.get("training.steps") == 10000
    assert job.model.dim == 4096
    assert set(job.resolved()) == set(keys())
    assert job.resolved()["quantize.linear.float8.filter_fqns"] == ["output"]
    with pytest.raises(InputError, match=r"did you mean training\.steps"):
        job.get("training.step")


def test_resolved_lists_are_not_shared() -> None:
    job = job_from_text(EXAMPLE, name="a.toml")
    job.resolved()["compile.components"].append("x")
    job.resolved()["quantize.linear.float8.filter_fqns"].append("x")
    assert job.get("compile.components") == ["model", "loss"]
    assert job.get("quantize.linear.float8.filter_fqns") == ["output"]


def test_with_values() -> None:
    job = job_from_text(EXAMPLE, name="a.toml")
    changed = job.with_values({"training.seq_len": 4096, "model.flavor": "70B", "job.description": None})
    assert (changed.get("training.seq_len"), changed.model.dim) == (4096, 8192)
    assert changed.get("job.description") == defaults()["job.description"]
    assert job.get("training.seq_len") == 8192
    with pytest.raises(InputError, match=r"job: training\.seq_len"):
        job.with_values({"training.seq_len": 0})
    with pytest.raises(InputError, match="unknown key"):
        job.with_values({"training.sequence": None})


def test_model_args() -> None:
    text = """
    [model]
    flavor = "1B"
    [titan_tune]
    compile_mode = "max-autotune"
    [titan_tune.model_args]
    dim = 2048
    n_layers = 16
    n_kv_heads = 8
    ffn_dim_multiplier = 1.5
    rope_scaling_args = { scaling_factor = 1 }
    """
    job = job_from_text(text, name="1b.toml")
    assert (job.model.ffn_hidden_dim, job.model.flavor) == (8192, "1B")
    assert job.model_args["rope_scaling_args"] == {"scaling_factor": 1.0}
    assert job.model_args == job.model.model_args
    assert "titan_tune.model_args.dim" not in job.resolved()
    assert job.resolved()["titan_tune.compile_mode"] == "max-autotune"
    wider = job.with_values({"titan_tune.model_args.dim": 4096})
    assert wider.model.dim == 4096


def test_load_job_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(EXAMPLE)
    job = load_job(path, sets=["training.seq_len=1024", "model.flavor=70B", "training.seq_len=2048"])
    assert (job.path, job.text) == (path, EXAMPLE)
    assert (job.get("training.seq_len"), job.model.dim) == (2048, 8192)
    again = job_from_text(render(job, {}), name="again")
    assert again.values == job.values


def test_hf_config_replaces_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_attention_heads": 16,'
        '"num_key_value_heads": 8, "num_hidden_layers": 28, "intermediate_size": 3072, "vocab_size": 151936,'
        '"max_position_embeddings": 40960, "rope_theta": 1000000, "head_dim": 128}'
    )
    path = tmp_path / "job.toml"
    path.write_text('[model]\nflavor = "mine"\n[titan_tune.model_args]\nmultiple_of = 8\n')
    job = load_job(path, sets=["titan_tune.model_args.n_layers=2"], hf_config=tmp_path / "config.json")
    assert (job.model.name, job.model.n_layers, job.model.ffn_hidden_dim) == ("qwen3", 2, 3072)
    written = job_from_text(render(job, {}), name="w")
    assert (written.values, written.model) == (job.values, job.model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[training]\nseq_len = = 1", ["not valid TOML", "line 2, column 11"]),
        ("[training]\nseq_len = 1\nseq_len = 2", ["not valid TOML", "overwrite"]),
        ("[training]\nsec_len = 1", ["training.sec_len", "did you mean training.seq_len?"]),
        ("[trainning]\nseq_len = 1", ["section [trainning]", "did you mean training?"]),
        ("[float8]\nemulate = true", ["section [float8]", "quantize.linear.float8"]),
        ("seq_len = 1", ["unknown key seq_len", "training.seq_len"]),
        ("training = 3", ["training is a section, not a key"]),
        ("training = [1]", ["training is a section, not a key"]),
        ("[[training]]\nseq_len = 1", ["training is a section, not a key"]),
        ('"training.seq_len" = 1', ["without quotes"]),
        ("[training.seq_len]\nx = 1", ["training.seq_len", "whole number"]),
        ('[training]\nseq_len = "4k"', ["training.seq_len", '"4k"']),
        ("[training]\nseq_len = 2024-01-01", ["training.seq_len", "2024-01-01"]),
        ('[model]\nname = "llama"', ["model.name", "'llama'", "models: llama3, qwen3"]),
        ('[model]\nflavor = "8b"', ["model.flavor", "'8b'", "did you mean 8B?", "70B"]),
        ("[titan_tune]\ncompile_mode = 'fast'", ["titan_tune.compile_mode", "max-autotune"]),
        ("[titan_tune.model_args]\nhidden_dim = 3", ["titan_tune.model_args.hidden_dim", "of llama3"]),
        ("[titan_tune.model_args]\ndim = {x = 3}", ["titan_tune.model_args.dim.x"]),
        ("[titan_tune.model_args]\nn_kv_heads = 5", ["n_heads = 32", "n_kv_heads = 5"]),
        (
            '[job]\ncustom_config_module = "my.config"\n[mine]\nx = 1',
            ["section [mine]", "sections that job.custom_config_module adds are not supported"],
        ),
    ],
)
def test_wrong_jobs_are_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_job(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert all(word in message for word in words), message
    assert len(message.splitlines()) == 1


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml: no such file"):
        load_job(tmp_path / "none.toml")
    with pytest.raises(InputError, match="is a directory"):
        load_job(tmp_path)
    (tmp_path / "a.toml").write_text("")
    with pytest.raises(InputError, match="cannot be read"):
        load_job(tmp_path / "a.toml" / "b.toml")
    (tmp_path / "latin.toml").write_bytes('[job]\ndescription = "café"'.encode("latin-1"))
    with pytest.raises(InputError, match="not UTF-8 text \\(byte 24\\)"):
        load_job(tmp_path / "latin.toml")
    with pytest.raises(InputError, match="--set: unknown section"):
        (tmp_path / "ok.toml").write_text("")
        load_job(tmp_path / "ok.toml", sets=["a.b=3"])


def test_render_edits_in_place() -> None:
    job = job_from_text(EXAMPLE, name="a.toml")
    changed = render(
        job,
        {
            "training.local_batch_size": 4,
            "training.steps": 20,
            "quantize.linear.float8.recipe_name": "rowwise",
            "compile.enable": True,
            "job.description": None,
        },
        comments=["written by titan-tune", "two\nlines"],
    )
    expected = EXAMPLE.replace("local_batch_size = 2 ", "local_batch_size = 4 ")
    expected = expected.replace('description = "8B"  # shown in the log\n', "")
    expected = expected.replace("num_workers = 2\n", "num_workers = 2\nsteps = 20\n")
    expected += 'recipe_name = "rowwise"\n\n[compile]\nenable = true\n'
    assert changed == "# written by titan-tune\n# two\n# lines\n\n" + expected


def test_render_checks_what_it_writes() -> None:
    job = job_from_text(EXAMPLE, name="a.toml")
    with pytest.raises(InputError, match=r"training\.seq_len"):
        render(job, {"training.seq_len": "x"})
    with pytest.raises(InputError, match="unknown key"):
        render(job, {"training.sec_len": 1})


def value_of(key: Key) -> st.SearchStrategy[Any]:
    """Valid values of a key."""
    if key.type == "bool":
        return st.booleans()
    if key.type == "int":
        low, high = key.minimum, key.maximum
        return st.integers(
            -1000 if low is None else int(low), 2**40 if high is None else int(high)
        ) | st.sampled_from(key.also or (7,))
    if key.type == "float":
        return st.floats(
            key.minimum if key.minimum is not None else -1e6,
            key.maximum if key.maximum is not None else math.inf,
            allow_nan=False,
        )
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    if key.pattern:
        texts = st.sampled_from(["op", "0", "12"])
    if key.choices:
        texts = st.sampled_from(key.choices)
    if key.type == "list":
        item = st.lists(texts, max_size=2) if key.element == "list[str]" else texts
        return st.lists(item, max_size=3)
    return texts


FREE = {name: value_of(key) for name, key in keys().items() if name not in ("model.name", "model.flavor")}
FREE["titan_tune.model_args.n_layers"] = st.integers(1, 99)
FREE["titan_tune.model_args.rope_scaling_args.scaling_factor"] = st.floats(1, 8)
NAMES = sorted(FREE)


@st.composite
def value_maps(draw: st.DrawFn, *, unset: bool = False, max_size: int = 12) -> dict[str, Any]:
    # neighbours, so that tables are shared and nested
    start = draw(st.integers(0, len(NAMES) - 1))
    window = [NAMES[(start + i) % len(NAMES)] for i in range(30)]
    quantize = [name for name in NAMES if name.startswith(("quantize", "titan_tune"))]
    names = draw(st.lists(st.sampled_from(window + quantize), max_size=max_size, unique=True))
    return {name: draw(FREE[name] | st.none() if unset else FREE[name]) for name in names}


def toml_value(value: Any) -> str:
    import tomlkit

    return tomlkit.item(value).as_string()


def inline(table: dict[str, Any]) -> str:
    if not isinstance(table, dict):
        return toml_value(table)
    return "{" + ", ".join(f"{name} = {inline(value)}" for name, value in table.items()) + "}"


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """The same keys as a user may write them: headers in any order, dotted keys, inline tables, comments."""
    from titan_tune.catalog.loader import nest

    values = draw(value_maps())
    root, tables = [], []
    for section, content in nest(values).items():
        style = draw(st.sampled_from(["headers", "dotted", "inline", "header with dots"]))
        if style == "inline":
            root.append(f"{section} = {inline(content)}")
            continue
        flat = flatten(content)
        if style == "dotted":
            root += [f"{section}.{name} = {toml_value(value)}" for name, value in flat.items()]
        elif style == "header with dots":
            tables.append("\n".join([f"[{section}]", *(f"{n} = {toml_value(v)}" for n, v in flat.items())]))
        else:
            groups: dict[str, list[str]] = {}
            for name, value in flat.items():
                parent, _, leaf = f"{section}.{name}".rpartition(".")
                groups.setdefault(parent, []).append(f"{leaf} = {toml_value(value)}")
            tables += ["\n".join([f"[{parent}]", *lines]) for parent, lines in groups.items()]
    tables = draw(st.permutations(tables))
    gap = draw(st.sampled_from(["\n", "\n\n", "\n# a comment\n", "  # behind\n\n"]))
    end = draw(st.sampled_from(["", "\n"]))
    return gap.join([*root, *tables]) + end, values


@settings(max_examples=300, deadline=None)
@given(documents(), value_maps(unset=True))
def test_render_round_trip(document: tuple[str, dict[str, Any]], edits: dict[str, Any]) -> None:
    text, values = document
    job = job_from_text(text, name="job")
    assert job.values == values
    assert render(job, {}) == text
    written = render(job, edits, comments=["first"])
    again = job_from_text(written, name="job")
    assert again.values == job.with_values(edits).values
    assert again.resolved() == job.with_values(edits).resolved()
    assert render(again, edits) == written
    assert written.startswith("# first\n\n")
    if None not in edits.values():
        assert written.count("# a comment") == text.count("# a comment")


@settings(max_examples=100, deadline=None)
@given(documents(), st.data())
def test_render_leaves_other_lines(document: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    text, values = document
    lines = [name for name in values if sum(line.startswith(f"{name} = ") for line in text.split("\n")) == 1]
    if not lines or '"""' in text:
        return
    name = data.draw(st.sampled_from(lines))
    changed = render(job_from_text(text, name="job"), {name: data.draw(FREE[name])})
    before, after = text.rstrip("\n").split("\n"), changed.rstrip("\n").split("\n")
    assert len(before) == len(after)
    assert all(old == new or old.startswith(f"{name} = ") for old, new in zip(before, after, strict=True))


@settings(deadline=None)
@given(documents())
def test_overrides_are_part_of_the_job(document: tuple[str, dict[str, Any]]) -> None:
    text, _ = document
    job: Job = job_from_text(text, name="job").with_values({"training.seq_len": 77})
    assert job_from_text(render(job, {}), name="job").values == job.values


@pytest.mark.torchtitan
@settings(max_examples=25, deadline=None)
@given(documents())
def test_resolves_as_torchtitan_does(document: tuple[str, dict[str, Any]]) -> None:
    """The same file through torchtitan's own ConfigManager gives the same value for every key."""
    from torchtitan.config import ConfigManager, JobConfig

    text, values = document
    if any(name.startswith("titan_tune.") for name in values):
        return
    job = job_from_text(text, name="job")
    real = ConfigManager()._dict_to_dataclass(JobConfig, tomllib.loads(text))
    assert {name: v for name, v in job.resolved().items() if not name.startswith("titan_tune.")} == flatten(
        asdict(real)
    )
