"""A table over the grid is its function at every cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import Settings
from titan_tune.space.axes import Axis, AxisValue, Space
from titan_tune.space.grid import Grid
from titan_tune.titan.job import job_from_text
from titan_tune.titan.keys import defaults

JOB = job_from_text('[model]\nname = "llama3"\nflavor = "8B"\n[compile]\nenable = true\n', name="job.toml")
VALUES: dict[str, list[Any]] = {
    "compile.enable": [False, True],
    "compile.components": [["model"], ["loss"], []],
    "titan_tune.compile_mode": ["default", "max-autotune", None],
    "training.local_batch_size": [1, 2, 4],
    "parallelism.tensor_parallel_degree": [1, 2, 4],
    "parallelism.data_parallel_shard_degree": [-1, 2],
    "model.converters": [[], ["quantize.linear.float8"], ["quantize.linear.mx"]],
    "quantize.linear.float8.recipe_name": [None, "rowwise"],
}


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Axes that set several keys, not always the same, some of which another axis sets too."""
    axes = []
    for number in range(draw(st.integers(0, 4))):
        names = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, min_size=1, max_size=3))
        choices = [
            AxisValue(
                str(label),
                {name: draw(st.sampled_from(VALUES[name])) for name in names if draw(st.booleans())},
            )
            for label in range(draw(st.integers(1, 4)))
        ]
        axes.append(Axis(f"axis {number}", tuple(choices)))
    return Space(JOB, ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8), tuple(axes), 64)


def compiled(settings: Settings, values: Mapping[str, Any]) -> object:
    return settings.compile.model, settings.compile.loss and settings.compile.mode


def by_path(settings: Settings, values: Mapping[str, Any]) -> object:
    """Reads other things after what it has read."""
    if settings.dims.tp > 1:
        return settings.gradient_accumulation_steps
    if settings.mxfp8:
        return values["quantize.linear.float8.recipe_name"]
    return (settings.float8, values.get("compile.enable"), values.get("no such key"))


def constant(settings: Settings, values: Mapping[str, Any]) -> object:
    return settings.model.n_layers, settings.cluster.world_size


@settings(max_examples=150, deadline=None)
@given(spaces(), st.sampled_from([compiled, by_path, constant]), st.data())
def test_a_table_is_its_function_at_every_wanted_cell(
    space: Space, function: Any, data: st.DataObject
) -> None:
    grid = Grid(space)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=grid.size, max_size=grid.size)), dtype=bool)
    table = grid.table(function, wanted)
    for cell in np.flatnonzero(wanted).tolist():
        values = {**space.base.resolved(), "training.global_batch_size": 64}
        for choice in grid.combination(cell):
            values |= {key: defaults()[key] if v is None else v for key, v in choice.values.items()}
        assert table.results[table.number[cell]] == function(grid.settings(values), values)
    assert len(set(table.results)) == len(table.results)


def test_functions_run_once_for_each_distinct_reading() -> None:
    axes = tuple(
        Axis(key, tuple(AxisValue(str(value), {key: value}) for value in VALUES[key]))
        for key in (
            "training.local_batch_size",
            "compile.enable",
            "titan_tune.compile_mode",
            "compile.components",
        )
    )
    grid = Grid(Space(JOB, ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8), axes, 64))
    calls = []

    def counting(settings: Settings, values: Mapping[str, Any]) -> object:
        calls.append(settings.compile.model)
        return calls[-1]

    table = grid.table(counting, np.ones(grid.size, dtype=bool))
    assert grid.size == 54 and len(calls) == 6
    assert (table.number >= 0).all() and table.results == (False, True)


def test_parts_that_are_watched_cannot_be_compared() -> None:
    """A comparison would read fields without a note of it."""
    grid = Grid(Space(JOB, ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8), (), 64))
    for function in (lambda s, v: s.compile == s.compile, lambda s, v: hash(s.compile)):
        with pytest.raises(TypeError):
            grid.table(function, np.ones(1, dtype=bool))
