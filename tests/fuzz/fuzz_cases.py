"""Random and mutated job and space files, each made from its number alone.

Half of the mutations know the file's structure (tables, known keys with values of their type, axes); the others
damage its text or its bytes. A case is cheap to make and is made when its turn comes.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from titan_tune.catalog.loader import flavors, gpu_names, model_arg_keys, model_names
from titan_tune.titan.keys import Key, is_section, keys

ROOT = Path(__file__).parents[2]
Tables = dict[str, Any]

HOSTILE_TEXTS = (
    "",
    " ",
    "a b",
    "'",
    '"',
    "\\",
    "\n",
    "\r\n",
    "\t",
    "\x00",
    "\x1b[31m",
    "\x7f",
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "${HOME}",
    "-rf",
    "--help",
    "../..",
    "/",
    "[/red]",
    "[bold]",
    "{}",
    "%s",
    "{0}",
    "é",
    "数据",
    "\u202egnirts",
    "\U0001f600",
    "\ufeff",
    "x" * 5000,
    "nan",
    "None",
    "true",
    "1",
)
HOSTILE_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    12,
    64,
    255,
    1024,
    10**6,
    2**31,
    2**63 - 1,
    2**63,
    10**30,
    10**400,
    -(10**30),
    0.0,
    -0.0,
    0.5,
    1e-300,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
)
OTHER_VALUES = (
    True,
    False,
    [],
    {},
    [[]],
    [1, 2],
    ["a"],
    [True, "a", 1.5],
    {"a": 1},
    [{"a": 1}],
    datetime.date(2026, 1, 2),
    datetime.time(7, 32),
    datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
)
FOREIGN_KEYS = (
    # torchtitan before 0.2, and after 0.3
    "model.tokenizer_path",
    "model.norm_type",
    "training.batch_size",
    "training.compile",
    "training.enable_float8_linear",
    "training.tensor_parallel_degree",
    "experimental.pipeline_parallel_degree",
    "float8.enable_fsdp_float8_all_gather",
    "checkpoint.enable_checkpoint",
    "parallelism.spmd_backend",
    "loss.num_chunks",
    "profiler.enable_profiling",
    "training.disable_cuda_graphs",
)
NAMED_AXES: Mapping[str, tuple[Any, ...]] = {
    "activation_checkpoint": (
        "none", "full", "selective-op", "selective-0", "selective-1", "selective-²", "selective-999999",
        "selective-" + "9" * 5000, "memory_budget-0.5", "memory_budget-nan", "memory_budget-1e999",
        "memory_budget-", "memory_budget-1_0", "selective",
    ),
    "compile": ("off", "default", "max-autotune", "reduce-overhead", "max-autotune-no-cudagraphs", "on"),
    "float8": ("off", "tensorwise", "rowwise", "rowwise_with_gw_hp", "tensorwise-fsdp_all_gather", "mx"),
    "local_batch_size": (1, 2, 3, 8, 10**6, 2**63, 0, -1, "2", 1.0),
    "parallelism": (
        {"dp_shard": 4, "tp": 2}, {"dp_shard": -1, "pp": 2}, {"tp": 10**9}, {"tp": 0}, {"pp": 2, "schedule": "GPipe"},
        {"pp": 2, "schedule": "x"}, {"cp": 8}, {"ep": 2, "etp": 2}, {"dp_replicate": -1}, {"pp": 4, "microbatch": 3},
        {"pp": 8, "schedule": "ZBVZeroBubble"}, {}, {"dp_shard": 2**70}, {"x": 1},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One file. ``history`` names what was done to which original."""

    number: int
    is_space: bool
    data: bytes
    history: tuple[str, ...]


def cases(start: int, stop: int) -> Iterator[Case]:
    """The cases of a range of numbers, made one by one."""
    return map(make_case, range(start, stop))


def make_case(number: int) -> Case:
    """The case of a number; always the same."""
    rng = random.Random(number)
    is_space = rng.random() < 0.4
    name, tables = rng.choice(_corpus(is_space))
    tables = json.loads(json.dumps(tables))
    history = [name]
    structural = SPACE_MUTATIONS + JOB_MUTATIONS if is_space else JOB_MUTATIONS
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        mutation = rng.choice(structural)
        history.append(mutation.__name__)
        mutation(rng, tables)
    data = toml_text(tables).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice((0, 0, 0, 0, 1, 2))):
        damage = rng.choice(DAMAGES)
        history.append(damage.__name__)
        data = damage(rng, data)
    return Case(number, is_space, data, tuple(history))


@cache
def _corpus(is_space: bool) -> list[tuple[str, Tables]]:
    paths = sorted((ROOT / ("search_spaces" if is_space else "examples")).glob("*.toml"))
    found = [(path.name, tomllib.loads(path.read_text(encoding="utf-8"))) for path in paths]
    if is_space:
        for _, tables in found:  # small grids: thousands of plans have to be made
            tables["cluster"] = {"gpu": "h100-80gb", "gpus_per_node": 2, "num_nodes": 1}
            tables["axes"]["activation_checkpoint"] = ["none", "full"]
            tables["axes"].pop("local_batch_size", None)
    else:
        # every family and flavor, one of them of its own; small, because advice on what does not fit takes longer
        training = {"seq_len": 2048, "local_batch_size": 1}
        found += [
            (f"{name} {flavor}", {"model": {"name": name, "flavor": flavor}, "training": training})
            for name in model_names()
            for flavor in flavors(name)
        ]
        own = tomllib.loads((ROOT / "search_spaces" / "llama3_1b_h200.toml").read_text(encoding="utf-8"))
        found.append(("1B with model_args", own["base"]))
    return found


# --- values ---------------------------------------------------------------------------------------------------


def any_value(rng: random.Random) -> Any:
    """A value of any type, mostly an unpleasant one."""
    # copies: later mutations change what they find in place
    return copy.deepcopy(
        rng.choice((rng.choice(HOSTILE_TEXTS), rng.choice(HOSTILE_NUMBERS), rng.choice(OTHER_VALUES)))
    )


def typed_value(rng: random.Random, key: Key) -> Any:
    """A value that the key accepts, or nearly."""
    if rng.random() < 0.2:
        return any_value(rng)
    if key.choices:
        texts = list(key.choices)
        return rng.sample(texts, rng.randint(0, len(texts))) if key.type == "list" else rng.choice(texts)
    if key.type == "bool":
        return rng.random() < 0.5
    if key.type == "int":
        return rng.choice(
            (1, 2, 3, 4, 5, 8, 16, 64, 96, 100, 1024, 4097, 131072, *key.also, 0, 10**9, 10**18)
        )
    if key.type == "float":
        return rng.choice((0.0, 0.1, 0.5, 1.0, 1.3, 2, 1e-8, 1e9, 1e300))
    if key.type == "list":
        return rng.choice(
            ([], ["output"], ["", "\n"], ["quantize.linear.float8"], [["tok_embeddings"], ["output"]])
        )
    return rng.choice(("", "x", "1", "op", "2", "llama3", "c4", *HOSTILE_TEXTS))


def any_key(rng: random.Random) -> str:
    """A dotted key of torchtitan or titan-tune, mostly one that decides validity, memory or speed."""
    names = list(keys())
    if rng.random() < 0.7:
        wanted = ("training.", "parallelism.", "activation_checkpoint.", "compile.", "quantize.", "model.")
        names = [name for name in names if name.startswith(wanted)]
    return rng.choice(names)


def put(tables: Tables, dotted: str, value: Any) -> None:
    """Set a dotted key; where a value stands in the way of a table, it goes."""
    *parents, leaf = dotted.split(".")
    for parent in parents:
        below = tables.get(parent)
        if not isinstance(below, dict):
            below = tables[parent] = {}
        tables = below
    tables[leaf] = value


def job_of(rng: random.Random, tables: Tables) -> Tables:
    """The job's tables: of a space file its base."""
    if "axes" not in tables and "base" not in tables:
        return tables
    base = tables.get("base")
    if not isinstance(base, dict):
        base = tables["base"] = {}
    return base


def places(tables: Tables) -> list[tuple[Tables, str]]:
    """Every (table, key) at any depth."""
    found: list[tuple[Tables, str]] = []
    for name, value in tables.items():
        found.append((tables, name))
        if isinstance(value, dict):
            found += places(value)
    return found


# --- mutations of the structure ----------------------------------------------------------------------------


def set_known_key(rng: random.Random, tables: Tables) -> None:
    name = any_key(rng)
    put(job_of(rng, tables), name, typed_value(rng, keys()[name]))


def set_several_known_keys(rng: random.Random, tables: Tables) -> None:
    for _ in range(5):
        set_known_key(rng, tables)


def set_any_value(rng: random.Random, tables: Tables) -> None:
    table, name = rng.choice(places(tables) or [(tables, "x")])
    table[name] = any_value(rng)


def wrap_in_list(rng: random.Random, tables: Tables) -> None:
    table, name = rng.choice(places(tables) or [(tables, "x")])
    table[name] = [table.get(name, 1)]


def take_out_of_list(rng: random.Random, tables: Tables) -> None:
    lists = [(table, name) for table, name in places(tables) if isinstance(table[name], list) and table[name]]
    if lists:
        table, name = rng.choice(lists)
        table[name] = rng.choice(table[name])


def remove(rng: random.Random, tables: Tables) -> None:
    found = places(tables)
    if found:
        table, name = rng.choice(found)
        del table[name]


def rename(rng: random.Random, tables: Tables) -> None:
    found = places(tables)
    if found:
        table, name = rng.choice(found)
        letters = list(name) or ["x"]
        letters[rng.randrange(len(letters))] = rng.choice(("", "x", "_", " ", ".", "\n", "é", "[/red]"))
        table["".join(letters)] = table.pop(name)


def add_unknown_key(rng: random.Random, tables: Tables) -> None:
    sections = [table[name] for table, name in places(tables) if isinstance(table[name], dict)]
    rng.choice([tables, *sections])[rng.choice(HOSTILE_TEXTS)] = any_value(rng)


def add_foreign_key(rng: random.Random, tables: Tables) -> None:
    put(job_of(rng, tables), rng.choice(FOREIGN_KEYS), any_value(rng))


def change_model(rng: random.Random, tables: Tables) -> None:
    name = rng.choice(model_names())
    job = job_of(rng, tables)
    put(job, "model.name", name)
    put(job, "model.flavor", rng.choice((*flavors(name), "8B", "")))


def define_model(rng: random.Random, tables: Tables) -> None:
    job = job_of(rng, tables)
    name = rng.choice(model_names())
    put(job, "model.name", name)
    known = model_arg_keys(name)
    for field in rng.sample(sorted(known), min(len(known), rng.randint(1, 6))):
        put(job, f"titan_tune.model_args.{field}", typed_value(rng, known[field]))


def section_for_key(rng: random.Random, tables: Tables) -> None:
    put(job_of(rng, tables), any_key(rng), {"a": 1})


def key_for_section(rng: random.Random, tables: Tables) -> None:
    sections = [name.partition(".")[0] for name in keys() if is_section(name.partition(".")[0])]
    job_of(rng, tables)[rng.choice(sections)] = any_value(rng)


def nest_deeply(rng: random.Random, tables: Tables) -> None:
    value: Any = any_value(rng)
    for _ in range(rng.choice((3, 30, 80))):
        value = {"a": value} if rng.random() < 0.5 else [value]
    put(tables, rng.choice(("a", "training", "axes.parallelism", any_key(rng))), value)


def wild_degrees(rng: random.Random, tables: Tables) -> None:
    job = job_of(rng, tables)
    for axis in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel",
                 "context_parallel", "expert_parallel"):  # fmt: skip
        if rng.random() < 0.5:
            put(job, f"parallelism.{axis}_degree", rng.choice((1, 2, 4, 8, 16, 3, -1, 10**9)))


def set_named_axis(rng: random.Random, tables: Tables) -> None:
    name = rng.choice(list(NAMED_AXES))
    entries = NAMED_AXES[name]
    value: Any = (
        copy.deepcopy(rng.sample(entries, rng.randint(0, len(entries)))) if rng.random() < 0.8 else "auto"
    )
    if isinstance(value, list) and rng.random() < 0.2:
        value.append(any_value(rng))
    put(tables, f"axes.{name}", value)


def set_key_axis(rng: random.Random, tables: Tables) -> None:
    axes = tables.get("axes")
    if not isinstance(axes, dict):
        axes = tables["axes"] = {}
    name = any_key(rng)
    axes[name] = [typed_value(rng, keys()[name]) for _ in range(rng.randint(0, 4))]


def set_cluster(rng: random.Random, tables: Tables) -> None:
    put(tables, "cluster.gpu", rng.choice(("cpu", "h200", *gpu_names(), "h2000", *HOSTILE_TEXTS)))
    for name in ("num_nodes", "gpus_per_node"):
        if rng.random() < 0.7:
            # hundreds of nodes are valid, and take seconds
            numbers = [number for number in HOSTILE_NUMBERS if not 8 < number < 10**6]
            put(tables, f"cluster.{name}", rng.choice((1, 2, 3, 4, *numbers)))


def set_fixed_budget_or_probe(rng: random.Random, tables: Tables) -> None:
    name = rng.choice(
        ("fixed.global_batch_size", "budget.max_probes", "budget.max_gpu_hours", "budget.max_wall_clock_hours",
         "probe.steps", "probe.warmup_steps", "probe.data", "probe.timeout_seconds", "probe.retries",
         "probe.target_relative_interval", "probe.loss_tolerance", "probe.finalists"),
    )  # fmt: skip
    put(tables, name, rng.choice((any_value(rng), rng.choice(HOSTILE_NUMBERS), "synthetic", "job\n")))


def set_base(rng: random.Random, tables: Tables) -> None:
    tables["base"] = rng.choice(("job.toml", "missing.toml", "../case.toml", ".", *HOSTILE_TEXTS, {}, [], 7))


JOB_MUTATIONS: tuple[Callable[[random.Random, Tables], None], ...] = (
    set_known_key, set_known_key, set_several_known_keys, set_several_known_keys, set_any_value, wrap_in_list,
    take_out_of_list, remove, rename, add_unknown_key, add_foreign_key, change_model, define_model, section_for_key,
    key_for_section, nest_deeply, wild_degrees, wild_degrees,
)  # fmt: skip
SPACE_MUTATIONS: tuple[Callable[[random.Random, Tables], None], ...] = (
    set_named_axis, set_named_axis, set_named_axis, set_key_axis, set_key_axis, set_cluster, set_cluster,
    set_fixed_budget_or_probe, set_fixed_budget_or_probe, set_base,
)  # fmt: skip


# --- damage of the bytes -----------------------------------------------------------------------------------


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def flip_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def repeat_a_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    if lines:
        lines.insert(rng.randint(0, len(lines)), rng.choice(lines))
    return b"".join(lines)


def drop_a_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    if lines:
        del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def shuffle_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


def crlf(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def bare_carriage_returns(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\n", b"\r")


def byte_order_mark(rng: random.Random, data: bytes) -> bytes:
    return b"\xef\xbb\xbf" + data


def utf16(rng: random.Random, data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode("utf-16", "surrogatepass")


def insert_rubbish(rng: random.Random, data: bytes) -> bytes:
    place = rng.randint(0, len(data))
    rubbish = rng.choice((
        b"\x00", b"\xff", b"=", b"[", b"]", b"[[", b'"', b"'''", b"#", b"\n[a]\n", b"\n[[training]]\n",
        b"\na.b.c = 1\n", b"\n= 1\n", b"1e999", b"0x", b"-nan", b"+inf", b"\xe2\x80\xa8", b"\\u0000", b"9" * 5000,
    ))  # fmt: skip
    return data[:place] + rubbish + data[place:]


def open_brackets(rng: random.Random, data: bytes) -> bytes:
    depth = rng.choice((10, 200, 5000))
    opening, closing = rng.choice(((b"[", b"]"), (b"{a=", b"}")))
    return data + b"\nx = " + opening * depth + b"1" + closing * rng.choice((0, depth))


def only_noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.randint(0, 300))


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    truncate, flip_bytes, repeat_a_line, drop_a_line, shuffle_lines, crlf, bare_carriage_returns, byte_order_mark,
    utf16, insert_rubbish, open_brackets, only_noise,
)  # fmt: skip


# --- TOML ------------------------------------------------------------------------------------------------------


def toml_text(tables: Tables) -> str:
    """The tables as TOML: keys first, then each table under its header."""
    return "\n".join(_lines(tables, ())) + "\n"


def _lines(table: Tables, path: tuple[str, ...]) -> Iterator[str]:
    below = {name: value for name, value in table.items() if isinstance(value, dict)}
    for name, value in table.items():
        if name not in below:
            yield f"{_text(name)} = {_value(value)}"
    for name, value in below.items():
        inner = (*path, name)
        yield f"[{'.'.join(map(_text, inner))}]"
        yield from _lines(value, inner)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(name)} = {_value(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return repr(value)


def _text(text: str) -> str:
    """A basic string or a quoted key (JSON's escapes are TOML's, but for DEL)."""
    bare = text.isascii() and text.replace("_", "").replace("-", "").isalnum()
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return text if bare and text in _BARE_NAMES else quoted


_BARE_NAMES = frozenset(part for name in keys() for part in name.split(".")) | {
    "base",
    "axes",
    "cluster",
    "fixed",
}
