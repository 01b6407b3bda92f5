"""What fuzzing found, each with the line it says now. The mutated files look for more."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_tune.cli import run
from titan_tune.errors import InputError
from titan_tune.space import enumerate as enumeration
from titan_tune.space.file import load_space
from titan_tune.space.named_axes import _divisors, _factorisations
from titan_tune.titan.job import job_from_text

JOB = """
[model]
name = "llama3"
flavor = "debugmodel"
"""
SPACE = """
[base.model]
name = "llama3"
flavor = "debugmodel"
"""
AXES = """
[cluster]
gpu = "h200"
gpus_per_node = 2
[axes]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        ("estimate", JOB + "[training]\nsteps = " + "9" * 5000, ["is not valid TOML", "4300"]),
        ("estimate", JOB + "[training]\nsteps = 0x" + "f" * 5000, ["training.steps has 20000 bits", "64"]),
        ("estimate", JOB + "[titan_tune.model_args]\n" + "a." * 3000 + "a = 1", ["32 levels deep"]),
        ("estimate", JOB + "x = " + "[" * 2000 + "]" * 2000, ["is not valid TOML"]),
        ("estimate", JOB + "[titan_tune.model_args]\nffn_dim_multiplier = 1e300", ["ffn_hidden_dim", "beyond"]),
        ("estimate", JOB + "[titan_tune.model_args]\nffn_dim_multiplier = inf", ["infinitely large"]),
        ("estimate", JOB + "[titan_tune.model_args]\nn_layers = 1000000000", ["n_layers", "beyond", "10000"]),
        (
            "estimate",
            '[model]\nname = "llama4"\nflavor = "mine"\n[titan_tune.model_args]\n'
            "ffn_dim_multiplier = 1e-6\nmultiple_of = 1",
            ["model: ", "greater than 0"],
        ),
        ("estimate", JOB + '[activation_checkpoint]\nselective_ac_option = "' + "9" * 5000 + '"', ["whole number"]),
        ("search", SPACE + AXES + 'activation_checkpoint = ["selective-' + "9" * 5000 + '"]', ["whole number"]),
        ("search", SPACE + AXES.replace("= 2", "= 4000000000") + 'compile = ["off"]', ["cluster", "at most 131072"]),
        ("search", 'base = "\\u0000"\n[axes]\ncompile = ["off"]', ["base", "null"]),
        ("search", 'base = "gone.toml"\n[axes]\ncompile = ["off"]', ["base: gone.toml: no such file"]),
        ("search", 'base = ""\n[axes]\ncompile = ["off"]', ["base: .: is a directory"]),
    ],
)  # fmt: skip
def test_one_line_that_names_the_file(capsys, command, text, words):
    Path("case.toml").write_text(text)
    assert run([command, "case.toml", *(["--plan"] if command == "search" else ["--gpu", "h200"])]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "case.toml" in said
    for word in words:
        assert word in said
    assert len(said) < 700


@pytest.mark.parametrize(
    "flags", [["--gpus", "131080"], ["--nodes", "100000", "--gpus-per-node", "8"], ["--nodes", "9" * 18]]
)
def test_clusters_beyond_all_bounds_are_refused(capsys, flags):
    Path("job.toml").write_text(JOB)
    assert run(["estimate", "job.toml", "--gpu", "h200", *flags]) == 2
    assert "at most 131072" in capsys.readouterr().err


def test_a_space_that_no_memory_holds_is_refused_with_its_longest_axes(monkeypatch):
    monkeypatch.setattr(enumeration, "MAX_COMBINATIONS", 7)
    Path("space.toml").write_text(
        SPACE + AXES + 'compile = ["off", "default"]\nlocal_batch_size = [1, 2, 4, 8]\n'
    )
    with pytest.raises(
        InputError, match=r"space\.toml: more than 7 combinations.*: local_batch_size \(4\), compile"
    ):
        enumeration.candidates(load_space("space.toml"))


def test_messages_cannot_steer_the_terminal(capsys):
    assert run(["estimate", "\x1b[31mred\x07.toml"]) == 2
    assert capsys.readouterr().err == "titan-tune: \\x1b[31mred\\x07.toml: no such file\n"


def test_layouts_of_any_number_of_ranks_are_enumerated_without_trying_all():
    """Every ordered product of five degrees, once; found divisor by divisor, not among all products."""
    model = job_from_text(JOB, name="job").model
    layouts = list(_factorisations(model, 720))
    assert len({tuple(layout.values()) for layout in layouts}) == len(layouts)
    for layout in layouts:
        product = 1
        for degree in layout.values():
            product *= degree
        assert product == 720
    # 720 = 2^4 * 3^2 * 5 in five ordered factors
    assert len(layouts) == 70 * 15 * 5


def test_divisors():
    assert _divisors(12) == (1, 2, 3, 4, 6, 12)
    assert _divisors(1) == (1,)
