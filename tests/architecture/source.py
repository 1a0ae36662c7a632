"""The product's own source as syntax trees: what is imported where."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("shared", "kernels", "worker", "controller")


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the product: its dotted name without the `kilburn.` -> its tree."""
    found = {}
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            words = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(words[:-1] if words[-1] == "__init__" else words)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of all that a module imports, at its top or inside a function, in any branch.

    `from kilburn.shared import codec` gives both kilburn.shared and kilburn.shared.codec: either may be the module.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0) if module:
                yield module, node.lineno
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in names)
            case ast.ImportFrom(level=level) if level:
                yield f"(relative import in {name})", node.lineno


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def own_imports(name: str) -> set[str]:
    """The product's modules that `name` imports, without the `kilburn.`."""
    known = modules()
    found = {target.removeprefix("kilburn.") for target, _ in imports(name, known[name]) if inside(target, "kilburn")}
    return {target for target in found if target in known}
