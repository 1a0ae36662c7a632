"""The core decides and does not act: no clock, no dice, no world, no colour, and the same answer in every process."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.architecture.source import PARTS, ROOT, imports, inside, modules

WORLD = {
    "asyncio",
    "concurrent",
    "contextvars",
    "datetime",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "random",
    "secrets",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
    "zmq",
    "aiohttp",
    "redis",
}

CORE = {name: tree for name, tree in modules().items() if inside(name, "controller.core")}

# Whatever is made of a set by these is the same in any order.
ORDERLESS = {"all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum"}


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_nothing_of_the_world(name: str) -> None:
    assert {target.split(".")[0] for target, _ in imports(name, CORE[name])} & WORLD == set()


@pytest.mark.parametrize("name", CORE)
def test_the_core_has_no_colour_no_files_and_no_process_bound_hashes(name: str) -> None:
    colours = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    for node in ast.walk(CORE[name]):
        assert not isinstance(node, colours), f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "hash", "id"}, f"line {node.lineno}: {node.func.id}()"


def sets_by_name(tree: ast.Module) -> set[str]:
    """Names and attributes that the file itself declares to be sets."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=target, annotation=annotation):
                pass
            case ast.arg(annotation=annotation) if annotation is not None:
                target = node
            case _:
                continue
        if ast.unparse(annotation).split("[")[0].strip("\"'") in {"set", "frozenset", "AbstractSet", "MutableSet"}:
            found.add(target.arg if isinstance(target, ast.arg) else ast.unparse(target).split(".")[-1])
    return found


def unordered(node: ast.expr, named: set[str]) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.BinOp(left=left, right=right, op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor()):
            return unordered(left, named) or unordered(right, named)
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word in named
    return False


def order_dependences(tree: ast.Module) -> Iterator[int]:
    """Lines where the order of a set's members can reach a result."""
    named = sets_by_name(tree)
    harmless = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ORDERLESS
        for argument in node.args
    }
    for node in ast.walk(tree):
        match node:
            case ast.For(iter=source):
                yield from [node.lineno] if unordered(source, named) else []
            case ast.ListComp(generators=loops) | ast.DictComp(generators=loops) | ast.GeneratorExp(generators=loops):
                if id(node) not in harmless and any(unordered(loop.iter, named) for loop in loops):
                    yield node.lineno
            case ast.Call(func=ast.Name(id="list" | "tuple" | "iter" | "next" | "enumerate"), args=[source, *_]):
                yield from [node.lineno] if unordered(source, named) else []
            case ast.Call(func=ast.Attribute(value=source, attr="pop"), args=[]):
                yield from [node.lineno] if unordered(source, named) else []


@pytest.mark.parametrize("name", CORE)
def test_no_answer_of_the_core_depends_on_the_order_of_a_set(name: str) -> None:
    assert list(order_dependences(CORE[name])) == []


SET_ORDER = [
    ("for x in {1, 2}: pass", True),
    ("s: set[int] = set()\nfor x in s: pass", True),
    ("class A:\n    def __init__(self):\n        self.s: set[int] = set()\n    def f(self): return list(self.s)", True),
    ("def f(s: frozenset[int]): return [x for x in s | {3}]", True),
    ("def f(s: set[int]): return s.pop()", True),
    ("def f(s: set[int]): return sorted(s), any(x for x in s), {x for x in s}, 3 in s, len(s)", False),
    ("def f(s: list[int]): return [x for x in s], s.pop()", False),
]


@pytest.mark.parametrize(("code", "found"), SET_ORDER)
def test_the_check_for_set_order_sees_it(code: str, found: bool) -> None:
    assert bool(list(order_dependences(ast.parse(code)))) == found


def test_a_controller_brings_neither_torch_nor_transformers_nor_numpy() -> None:
    code = (
        "import sys, kilburn.controller.cli, kilburn.controller.app\n"
        "heavy = ('torch', 'transformers', 'numpy', 'triton', 'numba', 'kilburn.worker', 'kilburn.kernels')\n"
        "print(*(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", modules())
def test_laws_are_raised_and_not_asserted(name: str) -> None:
    """-O strips `assert`; a law must hold there too."""
    assert [node.lineno for node in ast.walk(modules()[name]) if isinstance(node, ast.Assert)] == []


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, without those of the functions inside it, which are judged by themselves.

    The signature does not count: a kernel has a line for each pointer that it takes, with its shape.
    """
    inner = [node for node in ast.iter_child_nodes(function) if isinstance(node, FUNCTIONS)]
    lines = (function.end_lineno or 0) - function.body[0].lineno + 1
    return lines - sum((node.end_lineno or 0) - node.lineno + 1 for node in inner)


def test_names_say_what_a_file_is_about_and_files_stay_readable() -> None:
    vague = {"utils", "util", "helper", "helpers", "manager", "common", "misc"}
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            assert not vague & set(path.stem.split("_")), path
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, f"{path}: two ideas in one?"
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                assert own_lines(node) <= 80, f"{name}:{node.lineno} {node.name}: two ideas in one?"
