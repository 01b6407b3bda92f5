"""``titan-tune export --format python``: what the recipe sets, names, leaves out and refuses.

``titan_tune/titan/recipe_fields.json`` holds the fields of torchtitan 0.3.0 and what its config functions set
(``tools/make_recipe_fields.py``), so what a recipe comes to is computed here without running torchtitan 0.3.0.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.export.small_studies import info, make_study, measurement
from titan_tune.cli import run
from titan_tune.domain.probe import Origin
from titan_tune.errors import InputError
from titan_tune.export_recipe import front_name, module_name, recipe_code
from titan_tune.titan.job import Job, job_from_text
from titan_tune.titan.keys import defaults, keys
from titan_tune.titan.recipe import OPTIMIZER, build
from titan_tune.titan.recipe_keys import (
    GONE,
    RENAMED,
    SPECIAL,
    field_of,
    fields,
    flavor_of,
    gone,
    is_special,
    linear_names,
    renamed_filters,
    small_linears,
)
from titan_tune.titan.recipe_text import Recipe

GOLDEN = Path(__file__).parent / "golden"
FLOAT8 = "quantize.linear.float8"
AC = "activation_checkpoint"
ROWWISE = {"model.converters": [FLOAT8], f"{FLOAT8}.recipe_name": "rowwise", "compile.enable": True}


def a_job(name: str = "llama3", flavor: str = "8B", tables: str = "", **values: Any) -> Job:
    job = job_from_text(f'[model]\nname = "{name}"\nflavor = "{flavor}"\n{tables}', name="job.toml")
    return job.with_values({key.replace("__", "."): value for key, value in values.items()})


def code_of(job: Job, world_size: int = 8, **options: Any) -> str:
    return recipe_code(build(job, world_size=world_size, **options))


def evaluate(node: ast.expr) -> Any:
    """A literal, ``float("inf")`` included."""
    if isinstance(node, ast.Call):
        assert ast.unparse(node.func) == "float"
        return float(ast.literal_eval(node.args[0]))
    if isinstance(node, ast.List):
        return [evaluate(item) for item in node.elts]
    return ast.literal_eval(node)


def assigned(code: str) -> dict[str, Any]:
    """Field to value of every plain ``c.x.y = literal``."""
    found = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign):
            target = ast.unparse(node.targets[0])
            if target.startswith("c.") and target not in (
                "c.activation_checkpoint",
                "c.optimizer",
                "c.model_spec",
            ):
                assert target not in found, "assigned twice"
                found[target.removeprefix("c.")] = evaluate(node.value)
    return found


def value_of(code: str, target: str) -> str:
    """The source of what one target is assigned."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == target:
            return ast.unparse(node.value)
    raise AssertionError(f"{target} is not assigned")


def call(code: str, name: str) -> dict[str, Any]:
    """Keyword arguments of the one call of a name."""
    (found,) = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]
    return {str(keyword.arg): evaluate(keyword.value) for keyword in found.keywords}


VARIED = {
    "8B": (a_job(), 8),
    "8B full": (a_job(activation_checkpoint__mode="full", training__seq_len=8192), 8),
    "8B op": (a_job(**{f"{AC}.selective_ac_option": "op", "compile.enable": True}), 8),
    "8B float8": (a_job(**ROWWISE), 8),
    "70B": (a_job(flavor="70B", parallelism__tensor_parallel_degree=4, parallelism__pipeline_parallel_degree=2), 64),
    "405B": (a_job(flavor="405B", training__global_batch_size=1024), 512),
    "debugmodel": (a_job(flavor="debugmodel", training__seq_len=1020), 1),
    "varlen": (a_job(flavor="8B_varlen"), 8),
    "qwen3": (a_job("qwen3", "8B", debug__seed=1, optimizer__name="Adam"), 8),
    "qwen3 moe": (a_job("qwen3", "30B-A3B", parallelism__expert_parallel_degree=8), 8),
    "deepseek": (a_job("deepseek_v3", "16B", **{f"{AC}.mode": "none"}), 8),
    "gpt_oss": (a_job("gpt_oss", "20b", profiling__enable_profiling=True), 8),
    "inf": (a_job(training__max_norm=math.inf, training__dataset_path="/'\"\\x\n"), 8),
    "custom": (a_job(flavor="mine", tables="[titan_tune.model_args]\ndim = 512\nn_layers = 2\nn_heads = 8"), 8),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIED)
def test_every_field_comes_to_the_jobs_value(name):
    job, world_size = VARIED[name]
    flavor, code = flavor_of(job), code_of(job, world_size)
    sets = assigned(code)
    assert sets.keys() <= fields()["defaults"].keys()
    started_from = f"c = {flavor.entry['function']}()" in code
    assert started_from == (not flavor.custom and flavor.entry["function"] is not None)
    found = fields()["defaults"] | flavor.entry["base"] | sets
    for key, value in job.resolved().items():
        target = field_of(key)
        if target is None:
            continue
        versions_differ = value == defaults()[key] and found[target] == fields()["defaults"][target]
        assert found[target] == value or versions_differ, key


@pytest.mark.parametrize("name", VARIED)
def test_classes_get_arguments_that_they_have(name):
    code = code_of(*VARIED[name])
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".Config"):
            owner = ast.unparse(node.func).removesuffix(".Config")
            if owner in fields()["classes"]:
                assert {keyword.arg for keyword in node.keywords} <= fields()["classes"][owner].keys()


def test_only_folders_of_traces_have_other_defaults():
    """Any other such key would have to be written out in every recipe."""
    differ = {
        key for key in keys() if (name := field_of(key)) and fields()["defaults"][name] != defaults()[key]
    }
    assert differ == {"profiling.save_traces_folder", "profiling.save_memory_snapshot_folder"}


def test_every_key_has_one_place():
    for key in keys():
        places = [
            field_of(key) is not None,
            is_special(key),
            key in GONE or key.startswith("fault_tolerance."),
        ]
        assert sum(places) == 1, key
    assert {*RENAMED, *GONE, *SPECIAL} <= keys().keys()


def test_the_fields_are_those_of_the_version_that_is_named():
    assert fields()["torchtitan"] == "0.3.0"
    assert {"llama3", "qwen3", "deepseek_v3", "gpt_oss"} == fields()["models"].keys()


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("llama3_8b_full", a_job(**{f"{AC}.mode": "full", "training.global_batch_size": 64})),
        ("llama3_8b_float8", a_job(**{
            **ROWWISE, f"{FLOAT8}.filter_fqns": ["output"], f"{AC}.selective_ac_option": "op",
            "titan_tune.compile_mode": "max-autotune", "parallelism.tensor_parallel_degree": 2,
        })),
    ],
)  # fmt: skip
def test_golden(name, job):
    assert code_of(job, chosen=["compile.enable", f"{AC}.mode"]) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({f"{AC}.mode": "none"}, "None"),
        (
            {f"{AC}.mode": "full", f"{AC}.preserve_rng_state": False},
            "FullAC.Config(preserve_rng_state=False)",
        ),
        ({f"{AC}.selective_ac_option": "op"}, "SelectiveAC.Config()"),
        ({f"{AC}.selective_ac_option": "1"}, "FullAC.Config()"),
        ({f"{AC}.selective_ac_option": "0"}, "FullAC.Config()"),
        (
            {
                f"{AC}.selective_ac_option": "op",
                f"{AC}.per_op_sac_force_recompute_mm_shapes_by_fqns": ["attention.wq"],
            },
            "SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=['attention.qkv_linear.wqkv'])",
        ),
        ({f"{AC}.mode": "memory_budget", "compile.enable": True}, "MemoryBudgetAC.Config(memory_budget=0.5)"),
    ],
)
def test_activation_checkpointing(values, expected):
    recipe = build(a_job(**values), world_size=8)
    assert value_of(recipe_code(recipe), "c.activation_checkpoint") == expected
    assert not recipe.lost
    if expected != "None":
        assert recipe.imports["torchtitan.distributed.activation_checkpoint"] == {expected.split(".")[0]}


def test_every_second_layer_is_said_to_be_gone():
    recipe = build(a_job(), world_size=8)
    assert value_of(recipe_code(recipe), "c.activation_checkpoint") == "SelectiveAC.Config()"
    assert any("selective_ac_option" in line and "one in 2" in line for line in recipe.lost)


def test_float8_by_rows():
    job = a_job(**ROWWISE, **{f"{FLOAT8}.filter_fqns": ["output", "attention.wk"]})
    code = code_of(job)
    assert call(code, "Float8LinearConverter.Config") == {
        "recipe_name": "rowwise",
        "filter_fqns": ["lm_head", "attention.qkv_linear.wqkv"],
        "model_compile_enabled": True,
    }
    assert "q, k and v are one Linear in 0.3" in code
    assert ".build().convert(c.model_spec.model)" in code


def test_tensorwise_float8_is_not_made_rowwise():
    recipe = build(a_job(**ROWWISE | {f"{FLOAT8}.recipe_name": "tensorwise"}), world_size=8)
    code = recipe_code(recipe)
    assert "Float8LinearConverter" not in ast.unparse(ast.parse(code))
    assert "# gone in 0.3: tensorwise float8." in code
    assert any("tensorwise float8 is gone" in line and "bfloat16" in line for line in recipe.lost)


def test_float8_without_its_converter_is_no_float8():
    code = code_of(a_job(**{f"{FLOAT8}.recipe_name": "rowwise"}))
    assert "Float8LinearConverter" not in code
    assert f'# no effect: {FLOAT8}.recipe_name = "rowwise"' in code


def test_small_linears_are_left_out_by_name():
    job = a_job("qwen3", "0.6B", **ROWWISE, **{f"{FLOAT8}.filter_fqns": ["auto_filter_small_kn"]})
    arguments = call(code_of(job), "Float8LinearConverter.Config")
    assert arguments["filter_fqns"] == small_linears(flavor_of(job))
    assert (
        "attention.wo" in arguments["filter_fqns"] and "auto_filter_small_kn" not in arguments["filter_fqns"]
    )


def test_mxfp8_lists_what_is_converted():
    mx = {"model.converters": ["quantize.linear.mx"]}
    assert call(code_of(a_job(**mx)), "MXFP8LinearConverter.Config")["fqns"] == ["layers"]
    some = code_of(a_job(**mx, **{"quantize.linear.mx.filter_fqns": ["feed_forward"]}))
    assert call(some, "MXFP8LinearConverter.Config")["fqns"] == [
        "attention.qkv_linear.wqkv", "attention.wo", "lm_head",
    ]  # fmt: skip
    none = code_of(a_job(**mx, **{"quantize.linear.mx.filter_fqns": [""]}))
    assert "MXFP8LinearConverter" not in none and "leaves no Linear" in none


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["output"], ["lm_head"]),
        (["lm_head", "wqkv"], []),
        (["wq"], ["wq"]),
        (["attention.wv", "attention.wq"], ["attention.qkv_linear.wqkv"]),
        (["layers.3.attention.wk"], ["layers.3.attention.qkv_linear.wqkv"]),
        (["layers.1"], ["layers.1"]),
        (["feed_forward.w2"], ["feed_forward.w2"]),
        ([""], [""]),
    ],
)
def test_filters_keep_their_linears(filters, expected):
    job = a_job()
    names = linear_names(flavor_of(job), job.model.n_layers)
    found = renamed_filters(filters, names)
    assert found == expected
    before = {new for new, olds in names.items() for old in olds if any(part in old for part in filters)}
    assert before == {name for name in names if any(part in name for part in found)}


@pytest.mark.parametrize(
    ("values", "off"),
    [
        ({}, False),
        ({"parallelism.pipeline_parallel_degree": 2}, True),
        ({"parallelism.expert_parallel_degree": 2}, False),
    ],
)
def test_cuda_graphs_are_off_where_there_are_none(values, off):
    recipe = build(a_job(**values), world_size=8)
    assert assigned(recipe_code(recipe)).get("training.disable_cuda_graphs", False) is off
    assert any("CUDA graphs are on" in line for line in recipe.differences) is not off


def test_pipeline_stages_have_the_new_name_of_the_head():
    stages = [["tok_embeddings", "layers.0"], ["norm", "output"]]
    job = a_job(
        **{"parallelism.pipeline_parallel_degree": 2, "parallelism.module_fqns_per_model_part": stages}
    )
    found = assigned(code_of(job))["parallelism.module_fqns_per_model_part"]
    assert found == [["tok_embeddings", "layers.0"], ["norm", "lm_head"]]


def test_loss_chunks_divide_the_sequence_of_a_rank():
    job = a_job(training__seq_len=1020, parallelism__context_parallel_degree=2)
    assert assigned(code_of(job))["loss.num_chunks"] == 2
    assert "loss.num_chunks" not in assigned(code_of(a_job()))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"parallelism.data_parallel_replicate_degree": 8, "parallelism.data_parallel_shard_degree": 1},
            "was DDP",
        ),
        ({"parallelism.tensor_parallel_degree": 8}, "computed in float32; here in bfloat16"),
        ({"parallelism.pipeline_parallel_degree": 2}, "one more forward and backward"),
    ],
)
def test_what_the_layout_does_otherwise_is_said(values, words):
    assert any(words in line for line in build(a_job(**values), world_size=8).differences)
    assert not any(words in line for line in build(a_job(), world_size=8).differences)


def test_async_tensor_parallel_moves_and_needs_a_compiled_model():
    key = "parallelism.enable_async_tensor_parallel"
    compiled = assigned(code_of(a_job(**{key: True, "compile.enable": True})))
    assert compiled["compile.enable_async_tensor_parallel"] is True
    eager = code_of(a_job(**{key: True}))
    assert "compile.enable_async_tensor_parallel" not in assigned(eager)
    assert f"no effect without a compiled model: {key} = true" in eager


def test_the_optimizer_is_the_jobs():
    job = a_job(optimizer__lr=1e-4, optimizer__beta2=0.99, optimizer__implementation="foreach")
    code = code_of(job)
    assert (
        value_of(code, "c.optimizer")
        == "default_adamw(lr=0.0001, betas=(0.9, 0.99), eps=1e-08, weight_decay=0.1)"
    )
    assert code.index("c.optimizer = ") < code.index("c.optimizer.implementation = 'foreach'")
    adam = code_of(a_job(optimizer__name="Adam"))
    assert "optimizer_name='Adam'" in value_of(adam, "c.optimizer")


def test_a_longer_sequence_than_the_models_is_allowed():
    code = code_of(a_job("qwen3", "debugmodel", training__seq_len=8192))
    assert "rope.max_seq_len = 8192" in code
    assert "rope.max_seq_len" not in code_of(a_job("qwen3", "debugmodel", training__seq_len=4096))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (a_job("llama4", "17bx16e"), ["model.name", '"llama4"', "llama3, qwen3, deepseek_v3, gpt_oss"]),
        (a_job("gpt_oss", "debugmodel"), ["model.flavor", '"debugmodel"', "another model", "20b, 120b"]),
        (
            a_job("qwen3", "0.6B", parallelism__pipeline_parallel_degree=2),
            ["parallelism.pipeline_parallel_degree = 2", "tied", "it takes: 1"],
        ),
        (
            a_job("qwen3", "mine", "[titan_tune.model_args]\ndim = 512\n"),
            ["titan_tune.model_args", "llama3 only", "0.6B"],
        ),
        (
            a_job(flavor="mine", tables="[titan_tune.model_args]\ndepth_init = false\n"),
            ["titan_tune.model_args.depth_init = false", "takes: true"],
        ),
    ],
)
def test_what_would_be_another_job_is_refused(job, words):
    with pytest.raises(InputError) as error:
        build(job, world_size=8)
    message = str(error.value)
    assert message.startswith("job: ") and "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "name", ["best.toml", "best", "my-best.py", "a.b.py", "class.py", "llama3.py", "json.py", "rl.py"]
)
def test_file_names_that_cannot_be_modules(name):
    with pytest.raises(InputError, match="-o"):
        module_name(Path(name))


def test_file_names_that_are_modules():
    assert module_name(Path("out.d/best.py")) == "best"
    assert module_name(Path(front_name("0a-1b"))) == "tuned_0a_1b"


# --- any job ------------------------------------------------------------------------------------------------


def values_of(key: str) -> st.SearchStrategy[Any]:
    entry = keys()[key]
    if entry.choices and entry.type == "str":
        return st.sampled_from(list(entry.choices))
    if key == f"{AC}.selective_ac_option":
        return st.sampled_from(["op", "0", "1", "2", "7"])
    if key == "model.converters":
        return st.lists(
            st.sampled_from(
                [FLOAT8, "quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx", "own"]
            )
        )
    if entry.type == "list":
        parts = st.sampled_from(list(entry.choices)) if entry.choices else st.text(max_size=6) | NAMES
        return st.lists(st.lists(parts, max_size=2) if entry.element == "list[str]" else parts, max_size=3)
    return {
        "str": st.text(max_size=12),
        "bool": st.booleans(),
        "int": st.integers(1, 64),
        "float": st.floats(0.0, 1.0) | st.just(math.inf),
    }[entry.type]


NAMES = st.sampled_from(
    [
        "output",
        "attention.wq",
        "wo",
        "layers.0.",
        "feed_forward.w1",
        "moe.router.gate",
        "auto_filter_small_kn",
        '"""\n',
    ]
)
FREE = sorted(key for key in keys() if not key.startswith(("model.name", "model.flavor")))
ANY_VALUES = st.lists(st.sampled_from(FREE), min_size=1, max_size=8, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(name) for name in names})
)
NODES = (
    ast.Module, ast.ImportFrom, ast.alias, ast.FunctionDef, ast.arguments, ast.Assign, ast.Return, ast.Expr, ast.Call,
    ast.Attribute, ast.Name, ast.keyword, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Load, ast.Store, ast.For,
    ast.UnaryOp, ast.USub,
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=ANY_VALUES, flavor=st.sampled_from(["8B", "debugmodel", "8B_flex"]))
def test_any_job_gives_a_file_that_parses_and_names_every_changed_key(values, flavor):
    base = a_job(flavor=flavor)
    try:
        job = base.with_values(values)
    except InputError:
        assume(False)
    code = code_of(job)
    tree = ast.parse(code)
    assert all(isinstance(node, NODES) for node in ast.walk(tree))
    for key, value in job.resolved().items():
        if value == defaults()[key] or key in ("model.name", "model.flavor", "model.converters"):
            continue
        section, _, member = key.rpartition(".")
        named = key in code or f"c.{field_of(key)} = " in code
        assert named or (f"# {section}: " in code and f"{member} = " in code), key
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert names <= imported | {"c", "spec", "model", "float", "rope", "_"}
    assert imported <= names


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_text_of_a_study_is_never_code(text):
    job = a_job(
        training__dataset_path=text,
        job__description=text,
        metrics__save_tb_folder=text,
        compile__backend=text,
    )
    sets = assigned(code_of(job))
    assert sets.get("compile.backend", "inductor") == text or text == "inductor"
    if text != "tb":
        assert sets["metrics.save_tb_folder"] == text


def test_flavors_of_users_are_no_code():
    table = "[titan_tune.model_args]\ndim = 512\nn_layers = 2\nn_heads = 8\nnorm_eps = 1e-6"
    code = code_of(a_job(flavor='x\\"\\nimport os', tables=table))
    assert "import os" not in [line.strip() for line in code.splitlines()]
    recipe: Recipe = build(a_job(flavor="日本", tables=table), world_size=8)
    assert recipe.function == "llama3_model_tuned" and "norm.eps = 1e-06" in recipe_code(recipe)


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_a_recipe_with_where_it_is_from(folder, capsys):
    make_study(folder / "runs", "s")
    assert run(["export", "s", "--format", "python"]) == 0
    text = (folder / "best.py").read_text()
    assert value_of(text, "c.activation_checkpoint") == "FullAC.Config()"
    for line in (
        "# measured: 7,000 tokens/s per GPU, 95 % interval 6,930 to 7,070, 1 run(s)",
        "# set by titan-tune: activation_checkpoint.mode = 'selective' -> 'full'",
        "# A recipe for torchtitan 0.3.0, which needs torch 2.14 or newer. The figures above were measured with"
        " torchtitan 0.2.2;",
        "# nothing was measured with 0.3.0, whose defaults differ in memory and speed:",
        "# launch: env PYTORCH_ALLOC_CONF=expandable_segments:True torchrun --standalone --nproc-per-node=8"
        " -m torchtitan.train --module best --config llama3_8b_tuned",
    ):
        assert line in text.splitlines()
    said = capsys.readouterr().err
    assert "nothing was measured" in said and "--module best --config llama3_8b_tuned" in said
    assert "not carried over" not in said
    assert not (folder / "best.toml").exists()
    assert run(["export", "s", "--format", "python"]) == 0, "our own file is replaced"


def test_what_is_lost_is_a_warning_and_in_the_file(folder, capsys):
    make_study(folder / "runs", "s")
    assert run(["export", "s", "--format", "python", "--trial", "0"]) == 0
    assert "warning: not carried over: activation_checkpoint.selective_ac_option" in capsys.readouterr().err
    assert "# not carried over: activation_checkpoint.selective_ac_option" in (folder / "best.py").read_text()


def test_a_dry_run_is_not_called_measured(folder):
    make_study(folder / "runs", "s", best=measurement(7000.0, origin=Origin.DRY_RUN))
    assert run(["export", "s", "--format", "python"]) == 0
    text = (folder / "best.py").read_text()
    assert "The figures above were found in dry runs with torchtitan 0.2.2;" in text
    assert "measured:" not in text


def test_a_study_of_the_cpu_says_so(folder, capsys):
    make_study(folder / "runs", "s", study_info=info(cpu=True, nodes=2, per_node=2))
    assert run(["export", "s", "--format", "python", "-o", "out/best.py"]) == 0
    text = (folder / "out" / "best.py").read_text()
    assert "# not carried over: the study ran on CPU processes" in text
    assert "env PYTHONPATH=out torchrun --nnodes=2" in text and "PYTORCH_ALLOC_CONF" not in text
    assert "ran on CPU processes" in capsys.readouterr().err


def test_a_front_is_a_folder_of_modules(folder):
    make_study(folder / "runs", "s")
    assert run(["export", "s", "--format", "python", "--pareto"]) == 0
    files = sorted((folder / "front").iterdir())
    assert files and all(module_name(file).startswith("tuned_") for file in files)


def test_a_failed_trend_check_is_in_the_file(folder, capsys):
    trend = {"step_jitter": 0.4, "slow_steps": 3, "alloc_retries": 0, "late_alloc_retries": 0, "ooms": 0}
    make_study(folder / "runs", "s", details={"trend": trend})
    assert run(["export", "s", "--format", "python"]) == 0
    assert "warning: trend check fail: step time" in capsys.readouterr().err
    assert "# trend check: fail: step time: " in (folder / "best.py").read_text()


def test_a_model_that_is_gone_is_one_line(folder, capsys):
    text = '[model]\nname = "llama4"\nflavor = "debugmodel"\n'
    make_study(folder / "runs", "s", study_info=info(job_text=text))
    assert run(["export", "s", "--format", "python"]) == 2
    line = capsys.readouterr().err
    assert len(line.splitlines()) == 1 and 'job.toml: model.name = "llama4"' in line
    assert not (folder / "best.py").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "llama3.py"], ["llama3.py", "another module"]),
        (["-o", "best.toml"], ["ends in .py"]),
    ],
)
def test_bad_names_are_one_line(folder, capsys, arguments, words):
    make_study(folder / "runs", "s")
    assert run(["export", "s", "--format", "python", *arguments]) == 2
    line = capsys.readouterr().err
    assert len(line.splitlines()) == 1 and all(word in line for word in words)


def test_the_key_names_of_the_optimizer_exist():
    assert set(OPTIMIZER) <= keys().keys() and gone("memory_estimation.enable")
