"""The result as a Python recipe for torchtitan 0.3.0: a file with one function that returns a ``Trainer.Config``.

Pure. Every value of the 0.2.2 job goes to its 0.3.0 field where the config function that the recipe starts from
has another; a value without a field is a comment. Only names and reprs of values reach the file as code.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_tune.catalog.typed import printable, show
from titan_tune.domain.probe import Origin
from titan_tune.errors import InputError
from titan_tune.export import changed_keys, command_text, provenance, torchrun
from titan_tune.probe.launch import ALLOCATOR
from titan_tune.study.info import StudyInfo
from titan_tune.study.selection import Standing, Winner
from titan_tune.study.trend import Check, problems
from titan_tune.titan.recipe import build
from titan_tune.titan.recipe_keys import VERSION, fields
from titan_tune.titan.recipe_text import Recipe

TAKEN = frozenset(
    {"torch", "torchtitan", "torchao", "triton", "numpy", "titan_tune", *sys.stdlib_module_names}
)
"""Modules that a file of that name would hide, or that would hide the file."""


@dataclass(frozen=True)
class ExportedRecipe:
    """A rendered recipe."""

    text: str
    command: tuple[str, ...]
    lost: tuple[str, ...]
    """What of the measured configuration could not be carried over, one line each; also in the file."""
    problems: tuple[str, ...]
    """Trend checks that are not ok, one line each; also in the file."""


def export_recipe(
    info: StudyInfo,
    study_name: str,
    standing: Standing,
    *,
    winner: Winner | None,
    output: Path,
    checks: Sequence[Check] = (),
) -> ExportedRecipe:
    """Render one measured configuration of a study for torchtitan 0.3.0.

    Args:
        info: The study.
        study_name: Its name.
        standing: The configuration.
        winner: Gives the baseline that the gain is stated against.
        output: The file to be; its name is the module that torchtitan imports.
        checks: The configuration's trend checks.

    Raises:
        InputError: a model that 0.3.0 does not have, or a file name that cannot be imported.
    """
    module = module_name(output)
    base = replace(info.base(), path=Path(info.job_name))
    record = standing.latest
    job = base.with_values(dict(record.values))
    chosen = [key for key, value in record.values.items() if base.get(key) != value]
    recipe = build(job, chosen=chosen, world_size=info.cluster.world_size)
    lost = list(recipe.lost)
    if info.device == "cpu":
        lost.append("the study ran on CPU processes; torchtitan does not start without an accelerator")
    command = launch_command(info, output, module=module, function=recipe.function)
    found = problems(checks)
    comments = [
        *provenance(info, study_name, standing, winner),
        *[f"trend check: {problem}" for problem in found],
        *changed_keys(base, record.values),
        "",
        f"A recipe for torchtitan {VERSION}, which needs torch 2.14 or newer. The figures above were"
        f" {_found(standing)} with torchtitan {_measured_with(info)};",
        f"nothing was measured with {VERSION}, whose defaults differ in memory and speed:",
        *[f"- {difference}" for difference in recipe.differences],
        *[f"not carried over: {line}" for line in lost],
        "",
        f"The file's name is the module's: --module {module} --config {recipe.function}, with its folder on the path.",
        f"launch: {command_text(command)}",
    ]  # fmt: skip
    lines = [printable(line) for line in comments]
    header = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return ExportedRecipe(f"{header}\n{recipe_code(recipe)}", command, tuple(map(printable, lost)), found)


def recipe_code(recipe: Recipe) -> str:
    """The imports and the function."""
    imports = "".join(
        f"from {module} import {', '.join(sorted(names))}\n"
        for module, names in sorted(recipe.imports.items())
    )
    body = "".join(f"    {line}".rstrip() + "\n" for line in recipe.body)
    title = f'    """{recipe.title}, for torchtitan {VERSION}."""\n'
    return f"{imports}\n\ndef {recipe.function}() -> Trainer.Config:\n{title}{body}"


def module_name(path: Path) -> str:
    """The module that a recipe's file is.

    Raises:
        InputError: not a ``.py`` file, or a name that ``--module`` would not import or that means something else.
    """
    name = path.stem
    if path.suffix != ".py":
        raise InputError(f"-o: {path}: a Python recipe ends in .py, e.g. best.py")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise InputError(
            f"-o: {path}: --module cannot import {show(name)}; use letters, digits and _, e.g. best.py"
        )
    if name in TAKEN or name in {module.split(".")[0] for module in fields()["modules"]}:
        raise InputError(f"-o: {path}: --module {name} is another module; choose another name, e.g. best.py")
    return name


def front_name(config_id: str) -> str:
    """The file name of one configuration of a Pareto front."""
    return f"tuned_{re.sub(r'[^A-Za-z0-9]', '_', config_id)}.py"


def launch_command(info: StudyInfo, output: Path, *, module: str, function: str) -> tuple[str, ...]:
    """The torchrun command of a recipe, in the allocator mode that was measured."""
    cluster = info.cluster
    variables = [f"PYTORCH_ALLOC_CONF={ALLOCATOR}"] if info.device == "cuda" else []
    if output.parent != Path():
        variables.append(f"PYTHONPATH={output.parent}")
    return (
        *(("env", *variables) if variables else ()), *torchrun(cluster.num_nodes, cluster.gpus_per_node),
        "-m", "torchtitan.train", "--module", module, "--config", function,
    )  # fmt: skip


def _found(standing: Standing) -> str:
    return "found in dry runs" if standing.origin is Origin.DRY_RUN else "measured"


def _measured_with(info: StudyInfo) -> str:
    return str(info.environment.get("packages", {}).get("torchtitan") or "0.2.2")
