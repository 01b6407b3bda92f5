"""Imports point one way, heavy packages stay where they belong, and public names exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "titan_tune"
LAYERS = {
    "errors": 0,
    "units": 0,
    "domain": 1,
    "catalog": 2,
    "machine": 3,
    "titan": 3,
    "space": 4,
    "estimate": 4,
    "trace": 4,
    "probe": 5,
    "study": 6,
    "calibrate": 6,
    "report": 7,
    "diagnose": 7,
    "doctor": 7,
    "doctor_facts": 7,
    "export": 8,
    "export_sbatch": 8,
    "export_recipe": 8,
    "cli": 9,
}
HEAVY = {"torch", "torchtitan", "torchao"}


def modules() -> list[Path]:
    return sorted(
        p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).as_posix() not in ("__init__.py", "__main__.py")
    )


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names a module imports; type-checking blocks do not count."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= (
                {node.module} if node.module != "titan_tune" else {f"titan_tune.{a.name}" for a in node.names}
            )
    return found


def layer(dotted: str) -> int | None:
    parts = dotted.split(".")
    return LAYERS.get(parts[1]) if parts[0] == "titan_tune" and len(parts) > 1 else None


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    own = layer("titan_tune." + path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."))
    assert own is not None, f"{path.name} has no layer"
    for name in imports(path):
        other = layer(name)
        if other is not None:
            assert other <= own, f"imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_heavy_packages_stay_where_they_belong(path: Path) -> None:
    place = path.relative_to(ROOT).as_posix()
    roots = {name.split(".")[0] for name in imports(path)}
    if not place.startswith(
        ("titan/plugin/", "trace/", "probe/preload/", "calibrate/child", "calibrate/kernels")
    ):
        assert not roots & HEAVY
    if not place.startswith("study/"):
        assert "optuna" not in roots
    if place.startswith("cli/") or "/" not in place:
        early = {name.split(".")[0] for name in imports(path, top_level_only=True)}
        assert not early & {"numpy", "sqlalchemy", "psutil", "pynvml"}
