"""Every rule: one configuration that it is about, one next to it that it lets through."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from configurations import CPU, FLOAT8, MX, configuration

from titan_tune.domain.candidate import Finding
from titan_tune.titan import rules

ROOT = Path(__file__).parents[2]
QWEN_MOE = "qwen3/30B-A3B"
LLAMA4 = "llama4/17bx16e"
DEEPSEEK = "deepseek_v3/16B"
GPT_OSS = "gpt_oss/20b"
SDPA = {"attention": "sdpa"}
PARTS = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]

# rule id -> (what it is about, the nearest that it is not about)
EXAMPLES: dict[str, tuple[dict, dict]] = {
    "world-size": ({"shard": 4}, {"shard": 4, "tp": 2}),
    "expert-tensor-parallel": (
        {"model": QWEN_MOE, "tp": 4, "ep": 2, "etp": 2},
        {"model": QWEN_MOE, "tp": 4, "ep": 2, "etp": 4},
    ),
    "expert-mesh": ({"replicate": 2, "shard": 4, "ep": 8}, {"replicate": 2, "shard": 4, "ep": 4}),
    "ep-divides-experts": (
        {"model": "deepseek_v3/debugmodel", "ep": 16, "gpus": 16},
        {"model": "deepseek_v3/debugmodel", "ep": 8, "gpus": 16},
    ),
    "uneven-expert-shards": (
        {"model": "qwen3/235B-A22B", "ep": 8, "gpus": 65536},
        {"model": "qwen3/235B-A22B", "ep": 128, "gpus": 65536},
    ),
    "ep-needs-fsdp": ({"model": DEEPSEEK, "tp": 8, "ep": 8}, {"model": DEEPSEEK, "tp": 4, "ep": 8}),
    "deepep-expert-parallel": (
        {"model": DEEPSEEK, "ep_backend": "deepep"},
        {"model": DEEPSEEK, "ep_backend": "deepep", "ep": 8},
    ),
    "sequence-divides": ({"seq": 2050, "tp": 4}, {"seq": 2056, "tp": 4}),
    "tp-divides-heads": (
        {"tp": 8, "model_update": {"n_heads": 12, "n_kv_heads": 8}},
        {"tp": 4, "model_update": {"n_heads": 12, "n_kv_heads": 8}},
    ),
    "tp-divides-kv-heads": ({"gpus": 16, "tp": 16}, {"gpus": 16, "tp": 8}),
    "cp-attention": ({"model": DEEPSEEK, "cp": 2}, {"model": DEEPSEEK, "cp": 2, "model_update": SDPA}),
    "cp-load-balancer": ({"cp": 2, "balancer": "ptrr"}, {"cp": 1, "balancer": "ptrr"}),
    "ddp-more-dimensions": (
        {"replicate": 2, "shard": 1, "tp": 4},
        {"replicate": 2, "shard": 2, "tp": 2},
    ),
    "batch-divides": ({"local": 4, "global_": 48}, {"local": 3, "global_": 48}),
    "cpu-context-parallel": ({"gpu": CPU, "gpus": 2, "cp": 2}, {"gpu": CPU, "gpus": 2, "tp": 2}),
    "cpu-compile-tensor-parallel": (
        {"gpu": CPU, "gpus": 2, "tp": 2, "compile": True},
        {"gpu": CPU, "gpus": 2, "tp": 2, "compile": True, "components": ["loss"]},
    ),
    "cpu-attention": (
        {"gpu": CPU, "gpus": 2, "model": "llama3/debugmodel_flex_attn"},
        {"gpu": CPU, "gpus": 2, "model": "llama3/debugmodel"},
    ),
    "cpu-expert-parallel": (
        {"gpu": CPU, "gpus": 2, "model": "qwen3/debugmodel_moe", "ep": 2},
        {"gpu": CPU, "gpus": 2, "model": "qwen3/debugmodel", "ep": 2},
    ),
    "pp-family": ({"model": "qwen3/8B", "pp": 2}, {"model": "llama3/8B", "pp": 2}),
    "pp-schedule": ({"pp": 2, "schedule": "1F2B"}, {"pp": 2, "schedule": "1f1b"}),
    "pp-schedule-csv": (
        {"pp": 2, "schedule": "PipelineScheduleMulti"},
        {"pp": 2, "schedule": "PipelineScheduleMulti", "csv": "s.csv"},
    ),
    "pp-stages-divide": (
        {"pp": 4, "layers_per_stage": 5, "schedule": "Interleaved1F1B"},
        {"pp": 4, "layers_per_stage": 3, "schedule": "Interleaved1F1B"},
    ),
    "pp-stages-per-rank": (
        {"pp": 4, "layers_per_stage": 3},
        {"pp": 4, "layers_per_stage": 9},
    ),
    "pp-stages-layers": (
        {"model": "llama3/debugmodel", "pp": 8, "schedule": "Interleaved1F1B", "local": 16},
        {"model": "llama3/debugmodel", "pp": 8},
    ),
    "pp-explicit-split": ({"pp": 4, "split": PARTS}, {"pp": 2, "split": PARTS}),
    "pp-microbatch-divides": (
        {"pp": 2, "local": 8, "microbatch": 3},
        {"pp": 2, "local": 9, "microbatch": 3},
    ),
    "pp-microbatches": ({"pp": 4, "local": 3}, {"pp": 4, "local": 3, "schedule": "GPipe"}),
    "dualpipev-cpu-overlap": (
        {"gpu": CPU, "gpus": 2, "pp": 2, "schedule": "DualPipeV"},
        {"gpu": CPU, "gpus": 2, "pp": 2, "schedule": "DualPipeV", "overlap": False},
    ),
    "zero-bubble-compile": (
        {"pp": 2, "schedule": "ZBVZeroBubble", "compile": True},
        {"pp": 2, "schedule": "ZBVZeroBubble", "compile": True, "components": ["loss"]},
    ),
    "zero-bubble-op-ac": (
        {"pp": 2, "schedule": "InterleavedZeroBubble", "option": "op"},
        {"pp": 2, "schedule": "Interleaved1F1B", "option": "op"},
    ),
    "dualpipev-ep-ac": (
        {"model": DEEPSEEK, "pp": 2, "ep": 4, "schedule": "DualPipeV", "ac": "full"},
        {"model": DEEPSEEK, "pp": 2, "ep": 4, "schedule": "DualPipeV", "ac": "none"},
    ),
    "converter-name": (
        {"converters": ["float8"]},
        {"converters": ["float8"], "values": {"experimental.custom_import": "mine"}},
    ),
    "converter-mix": (
        {"converters": [*FLOAT8, "quantize.grouped_mm.mx"], "gpu": "b200"},
        {"converters": [*FLOAT8, "quantize.grouped_mm.float8"], "gpu": "b200"},
    ),
    "float8-hardware": (
        {"converters": FLOAT8, "gpu": "a100-80gb"},
        {"converters": FLOAT8, "gpu": "a100-80gb", "emulate": True},
    ),
    "float8-emulate-recipe": (
        {"converters": FLOAT8, "gpu": "a100-80gb", "emulate": True, "recipe": "rowwise"},
        {"converters": FLOAT8, "gpu": CPU, "emulate": True, "recipe": "rowwise"},
    ),
    "float8-recipe-all-gather": (
        {"converters": FLOAT8, "recipe": "tensorwise", "all_gather": True},
        {"converters": FLOAT8, "all_gather": True},
    ),
    "float8-tensor-parallel-shape": (
        {"converters": FLOAT8, "tp": 4, "model_update": {"ffn_hidden_dim": 14368}},
        {"converters": FLOAT8, "tp": 2, "model_update": {"ffn_hidden_dim": 14368}},
    ),
    "grouped-float8": (
        {"model": LLAMA4, "pp": 2, "converters": ["quantize.grouped_mm.float8"]},
        {"model": LLAMA4, "pp": 1, "converters": ["quantize.grouped_mm.float8"]},
    ),
    "mxfp8-hardware": ({"converters": MX}, {"converters": MX, "gpu": "b200"}),
    "mxfp8-tensor-parallel-compile": (
        {"converters": MX, "gpu": "b200", "tp": 2, "compile": True},
        {"converters": MX, "gpu": "b200", "tp": 2},
    ),
    "memory-budget-compile": (
        {"ac": "memory_budget", "compile": True, "components": ["loss"]},
        {"ac": "memory_budget", "compile": True},
    ),
    "async-tp-compile": ({"tp": 2, "async_tp": True}, {"tp": 1, "async_tp": True}),
    "early-step": ({"pp": 2, "early_step": True}, {"tp": 2, "early_step": True}),
    "cpu-offload": ({"gpus": 1, "offload": True}, {"gpus": 2, "offload": True}),
    "cpu-offload-on-cpu": (
        {"gpu": CPU, "gpus": 2, "offload": True},
        {"gpu": CPU, "gpus": 2, "offload": False},
    ),
    # --- warnings ---
    "fp32-tensor-parallel": ({"gpus": 2, "tp": 2}, {"gpus": 2, "tp": 2, "dtype": "bfloat16"}),
    "fp32-pipeline-parallel": ({"gpus": 2, "pp": 2}, {"gpus": 4, "pp": 2}),
    "ddp-unsharded": ({"replicate": 8}, {"replicate": 2}),
    "ddp-gradient-division": ({"replicate": 8, "dtype": "bfloat16"}, {"replicate": 2}),
    "ddp-over-tensor-parallel": (
        {"model": "qwen3/8B", "replicate": 4, "tp": 2},
        {"model": "qwen3/8B", "replicate": 8},
    ),
    "ep-without-fsdp": ({"model": QWEN_MOE, "tp": 8, "ep": 8}, {"model": QWEN_MOE, "tp": 4, "ep": 8}),
    "pp-unnormalized-loss": ({"pp": 2}, {"tp": 2}),
    "pp-bubble": ({"pp": 4, "schedule": "Interleaved1F1B", "local": 4}, {"pp": 4, "local": 4}),
    "dualpipev-overlap": (
        {"pp": 2, "schedule": "DualPipeV"},
        {"pp": 2, "schedule": "DualPipeV", "overlap": False},
    ),
    "pp-ep-compile-checkpoint": (
        {"model": DEEPSEEK, "pp": 2, "ep": 4, "compile": True},
        {"model": DEEPSEEK, "pp": 2, "ep": 4, "compile": True, "ac": "none"},
    ),
    "async-tp-not-proven": (
        {"tp": 2, "async_tp": True, "compile": True},
        {"tp": 1, "async_tp": True, "compile": True},
    ),
    "float8-tensor-parallel": (
        {"converters": FLOAT8, "tp": 2},
        {"converters": FLOAT8, "tp": 2, "recipe": "rowwise"},
    ),
    "float8-rowwise-tensor-parallel": (
        {"converters": FLOAT8, "tp": 2, "recipe": "rowwise"},
        {"converters": FLOAT8, "tp": 1, "recipe": "rowwise"},
    ),
    "qwen3-tensor-context-parallel": (
        {"model": "qwen3/8B", "tp": 2, "cp": 2},
        {"model": "llama3/8B", "tp": 2, "cp": 2},
    ),
    "float8-small-model": (
        {"converters": FLOAT8, "model": "llama3/debugmodel"},
        {"converters": FLOAT8, "model": "llama3/8B"},
    ),
    "float8-filter": (
        {"converters": FLOAT8, "filters": ["layers", "output"]},
        {"converters": FLOAT8, "filters": ["layers.0", "output"]},
    ),
    "float8-all-gather-unsharded": (
        {"converters": FLOAT8, "all_gather": True, "gpus": 2, "cp": 2},
        {"converters": FLOAT8, "all_gather": True, "gpus": 4, "cp": 2},
    ),
    "float8-emulate": ({"converters": FLOAT8, "emulate": True}, {"converters": FLOAT8}),
    "float8-eager": ({"converters": FLOAT8}, {"converters": FLOAT8, "compile": True}),
    "grouped-fqns": (
        {"model": LLAMA4, "converters": ["quantize.grouped_mm.float8"]},
        {
            "model": LLAMA4,
            "converters": ["quantize.grouped_mm.float8"],
            "values": {"quantize.grouped_mm.float8.fqns": ["experts"]},
        },
    ),
    "mxfp8-compile-checkpoint": (
        {"converters": MX, "gpu": "b200", "compile": True, "ac": "full"},
        {"converters": MX, "gpu": "b200", "compile": True, "ac": "none"},
    ),
    "grouped-mm": ({"model": QWEN_MOE, "gpu": "a100-80gb"}, {"model": QWEN_MOE, "gpu": "h200"}),
    "expert-parallel-dense": ({"ep": 8}, {"model": QWEN_MOE, "ep": 8}),
    "ep-compile-hang": ({"model": QWEN_MOE, "ep": 8, "compile": True}, {"ep": 8, "compile": True}),
    "moe-recompute-routing": ({"model": QWEN_MOE, "ac": "full"}, {"model": QWEN_MOE, "option": "op"}),
    "gpt-oss-compile": (
        {"model": GPT_OSS, "compile": True},
        {"model": GPT_OSS, "compile": True, "components": ["loss"]},
    ),
    "attention-always-compiles": (
        {"model": "llama3/8B_flex"},
        {"model": "llama3/8B_flex", "compile": True},
    ),
    "eager-op-checkpoint": ({"option": "op"}, {"option": "op", "compile": True}),
    "init-timeout": (
        {"compile": True, "compile_mode": "max-autotune"},
        {"compile": True, "compile_mode": "max-autotune", "timeout": 1200},
    ),
    "early-step-clipping": ({"early_step": True}, {"early_step": False}),
    "hsdp-accumulation": ({"replicate": 2, "global_": 128}, {"replicate": 2, "global_": 64}),
    "warmup-steps": ({"steps": 100}, {"steps": 100, "total_steps": 10000}),
    "sequence-over-range": (
        {"model_update": {"max_seq_len": 8192}, "seq": 16384},
        {"model_update": {"max_seq_len": 8192}, "seq": 8192},
    ),
    "mfu-peak": ({"gpu": "rtx4090"}, {"gpu": "h100-80gb"}),
}


def findings(short: dict) -> dict[str, Finding]:
    settings, values = configuration(**short)
    return {f.rule: f for f in (*rules.invalid(settings, values), *rules.warnings(settings, values))}


def test_every_rule_has_an_example() -> None:
    assert set(EXAMPLES) == {rule.id for rule in rules.RULES}


@pytest.mark.parametrize("rule_id", EXAMPLES)
def test_rule_finds_its_example_and_spares_the_neighbour(rule_id: str) -> None:
    about, neighbour = EXAMPLES[rule_id]
    found = findings(about)
    assert rule_id in found, f"{rule_id} is silent; found {sorted(found)}"
    assert rule_id not in findings(neighbour)
    finding = found[rule_id]
    assert finding.message and finding.fix
    assert "{" not in finding.message + finding.fix
    assert "\n" not in finding.message + finding.fix


@pytest.mark.parametrize("rule_id", EXAMPLES)
def test_first_invalid_agrees_with_invalid(rule_id: str) -> None:
    settings, values = configuration(**EXAMPLES[rule_id][0])
    every = rules.invalid(settings, values)
    assert rules.first_invalid(settings, values) == (every[0] if every else None)


def test_default_job_is_valid_and_without_warnings() -> None:
    settings, values = configuration(compile=True)
    assert rules.invalid(settings, values) == ()
    assert rules.warnings(settings, values) == ()


def test_rules_say_where_they_come_from() -> None:
    for rule in rules.RULES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.id)
        assert re.search(r"\.py|torch/distributed|issue|pull request", rule.source), (
            f"{rule.id} has no source"
        )


def test_layout_rules_look_at_the_layout_only() -> None:
    """A search evaluates them once per layout: nothing else may change what they say."""
    other = {
        "compile": True,
        "ac": "full",
        "converters": FLOAT8,
        "dtype": "bfloat16",
        "early_step": True,
    }
    for rule in rules.LAYOUT_RULES:
        for example in EXAMPLES[rule.id]:
            settings, values = configuration(**example)
            changed_settings, changed = configuration(**{**other, **example})
            assert rule(settings, values) == rule(changed_settings, changed)


def test_a_message_names_key_and_value() -> None:
    finding = findings({"gpus": 16, "tp": 16})["tp-divides-kv-heads"]
    assert finding.message == "tensor_parallel_degree=16 does not divide 8 KV heads"
    assert finding.fix == "choose a tensor_parallel_degree that divides 8"


@pytest.mark.parametrize(
    ("schedule", "pp", "local", "accepted"),
    [
        ("1F1B", 4, 3, False),
        ("1F1B", 4, 4, True),
        ("GPipe", 4, 1, True),
        ("Interleaved1F1B", 2, 5, False),  # 2 rounds do not divide 5
        ("Interleaved1F1B", 4, 5, True),  # one round
        ("InterleavedZeroBubble", 2, 7, False),
        ("ZBVZeroBubble", 4, 1, True),
        ("DualPipeV", 2, 3, False),
        ("DualPipeV", 2, 4, True),
    ],
)
def test_microbatches_by_schedule(schedule: str, pp: int, local: int, accepted: bool) -> None:
    settings, values = configuration(pp=pp, local=local, schedule=schedule, ac="none")
    found = {finding.rule for finding in rules.invalid(settings, values)}
    assert ("pp-microbatches" not in found) is accepted


def test_amd_has_float8_but_no_mxfp8() -> None:
    assert "float8-hardware" not in findings({"gpu": "mi300x", "converters": FLOAT8})
    assert "mxfp8-hardware" in findings({"gpu": "mi300x", "converters": MX})


def make_rules_doc() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_rules_doc", ROOT / "tools" / "make_rules_doc.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rules_page_is_current() -> None:
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert page == make_rules_doc().render(), "run: python tools/make_rules_doc.py"


def test_another_sequence_length_is_no_fix_for_a_degree_that_does_not_divide_the_heads() -> None:
    found = findings({"gpus": 24, "tp": 3, "seq": 8192})
    assert "tp-divides-heads" in found
    assert "sequence-divides" not in found
