from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.errors import InputError
from titan_tune.titan.keys import Key, check_value, defaults, keys, parse_assignment

ROOT = Path(__file__).parents[2]


@pytest.mark.torchtitan
def test_keys_json_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    made = importlib.import_module("make_keys").build()
    text = (ROOT / "titan_tune/titan/keys.json").read_text(encoding="utf-8")
    assert json.loads(json.dumps(made)) == json.loads(text)


def test_keys_have_types_defaults_and_choices() -> None:
    known = keys()
    assert known["training.seq_len"] == Key("training.seq_len", "int", 2048, minimum=1, maximum=100_000_000)
    recipe = known["quantize.linear.float8.recipe_name"]
    assert (recipe.optional, recipe.default) == (True, None)
    assert recipe.choices == ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    assert known["training.dataloader.num_workers"].type == "int"
    assert known["parallelism.module_fqns_per_model_part"].element == "list[str]"
    assert known["training.max_norm"].type == "float"
    assert known["titan_tune.compile_mode"].default == "default"
    assert known["titan_tune.data"].choices == ("synthetic", "job")


@pytest.mark.parametrize("name", keys())
def test_defaults_are_valid_values(name: str) -> None:
    value = defaults()[name]
    checked = check_value(name, value, source="default")
    assert checked == value


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("optimizer.lr", 1, 1.0),
        ("training.global_batch_size", -1, -1),
        ("parallelism.data_parallel_shard_degree", -1, -1),
        ("training.max_norm", math.inf, math.inf),
        ("activation_checkpoint.selective_ac_option", "op", "op"),
        ("activation_checkpoint.selective_ac_option", "0", "0"),
        ("lr_scheduler.total_steps", None, None),
        ("parallelism.module_fqns_per_model_part", [["a"], []], [["a"], []]),
        ("titan_tune.model_args.moe_args.num_experts", 4, 4),
    ],
)
def test_good_values(key: str, value: Any, expected: Any) -> None:
    checked = check_value(key, value, source="x")
    assert checked == expected
    assert type(checked) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("training.seq_len", "4k", ['"4k"', "a whole number from 1 to 100,000,000"]),
        ("training.local_batch_size", 99999999999999999999, ["a whole number from 1 to 1,000,000"]),
        ("training.global_batch_size", 10**10, ["a whole number from 1 to 1,000,000,000 or -1"]),
        ("training.seq_len", 4096.0, ["4096.0", "whole number"]),
        ("training.seq_len", True, ["true", "whole number"]),
        ("training.seq_len", 0, ["0", "from 1 to"]),
        ("training.seq_len", None, ["unset"]),
        ("training.global_batch_size", -2, ["-2", "from 1 to 1,000,000,000 or -1"]),
        ("optimizer.lr", math.nan, ["a number"]),
        ("compile.enable", 1, ["true or false"]),
        ("compile.components", ["modle"], ["a list of model, loss", "did you mean model"]),
        ("model.converters", "quantize.linear.float8", ["a list of texts"]),
        ("model.converters", [1], ["a list of texts"]),
        ("activation_checkpoint.mode", "Full", ["one of selective, full", "did you mean full"]),
        ("activation_checkpoint.selective_ac_option", "-1", ['"op" or a whole number in quotes']),
        ("activation_checkpoint.memory_budget", 1.5, ["from 0 to 1"]),
        ("quantize.grouped_mm.mx.fqns", "experts", ["a list of texts"]),
        ("parallelism.module_fqns_per_model_part", ["a"], ["a list of lists of texts"]),
    ],
)
def test_wrong_values_name_everything(key: str, value: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        check_value(key, value, source="job.toml")
    message = str(caught.value)
    assert message.startswith(f"job.toml: {key} = ")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("training.sec_len", ["did you mean training.seq_len?"]),
        ("trainning.seq_len", ["section [trainning]", "did you mean training?"]),
        ("seq_len", ["did you mean training.seq_len"]),
        ("compile", ["is a section with enable, components, backend"]),
        ("compile.zzz", ["keys of [compile]: enable, components, backend"]),
        ("float8.recipe_name", ["quantize.linear.float8"]),
        ("training.seq_len.x", ["training.seq_len is a key"]),
        ("training.dataloader.num_worker", ["training.dataloader.num_workers"]),
        ("zzz", ["sections: job, profiling"]),
        ("titan_tune.compile_mod", ["titan_tune.compile_mode"]),
        ("titan_tune.model_args.dims", ["did you mean dim?"]),
        ("titan_tune.model_args", ["is a section"]),
        ("", ["unknown key"]),
    ],
)
def test_unknown_keys_name_the_nearest(name: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        check_value(name, 1, source="--set")
    message = str(caught.value)
    assert message.startswith("--set: ")
    assert all(word in message for word in words), message
    assert "\n" not in message


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@settings(deadline=None)
@given(
    st.sampled_from(sorted(keys())) | st.text(),
    st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
)
def test_any_value_is_taken_or_refused_in_one_line(name: str, value: Any) -> None:
    try:
        checked = check_value(name, value, source="x.toml")
    except InputError as error:
        # one line in every editor: str.splitlines knows more line ends than \n
        assert len(str(error).splitlines()) == 1
        assert str(error).startswith("x.toml: ")
    else:
        assert check_value(name, checked, source="x.toml") == checked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.seq_len=4096", ("training.seq_len", 4096)),
        (" training.seq_len = 4_096 ", ("training.seq_len", 4096)),
        ("model.flavor=8B", ("model.flavor", "8B")),
        ('model.flavor="8B"', ("model.flavor", "8B")),
        ("activation_checkpoint.selective_ac_option=2", ("activation_checkpoint.selective_ac_option", "2")),
        ("job.description=a=b c", ("job.description", "a=b c")),
        ("optimizer.lr=3e-4", ("optimizer.lr", 3e-4)),
        ("optimizer.lr=1", ("optimizer.lr", 1.0)),
        ("compile.enable=true", ("compile.enable", True)),
        ('compile.components=["model"]', ("compile.components", ["model"])),
        ("compile.components=model,loss", ("compile.components", ["model", "loss"])),
        ("titan_tune.compile_mode=max-autotune", ("titan_tune.compile_mode", "max-autotune")),
        ("titan_tune.model_args.dim=256", ("titan_tune.model_args.dim", 256)),
        (
            'parallelism.module_fqns_per_model_part=[["a"], ["b"]]',
            ("parallelism.module_fqns_per_model_part", [["a"], ["b"]]),
        ),
    ],
)
def test_assignments(text: str, expected: tuple[str, Any]) -> None:
    assert parse_assignment(text, source="--set") == expected


@pytest.mark.parametrize(
    "text",
    [
        "training.seq_len",
        "=3",
        "training.seq_len=",
        "training.seq_len=four",
        "training.seq_len=1\ntraining.steps=2",
        "training.seq_len=1 2",
        "compile.enable=True",
        "compile.components=[model]",
        "training.sec_len=3",
        'model.flavor="8B',
    ],
)
def test_wrong_assignments(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_assignment(text, source="--set")
    assert str(caught.value).startswith("--set")
    assert len(str(caught.value).splitlines()) == 1
