"""Nothing in the tree turns bytes from elsewhere into objects or code (S1), and no default is open to others (S2)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shared", "kernels", "worker", "controller", "bench", "tests")

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"}
METHODS |= {"send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object", "gather_object"}


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of each thing that has no place here."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from [(node.lineno, n.name) for n in names if n.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=module, names=names) if module:
                if module.split(".")[0] in MODULES or any(n.name in MODULES | METHODS for n in names):
                    yield node.lineno, module
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="builtins"), attr=name)) if name in CALLS:
                yield node.lineno, name
            case ast.Attribute(attr=name) if name in METHODS:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not any(k.arg == "weights_only" and _is_true(k.value) for k in keywords):
                    yield node.lineno, "torch.load without weights_only=True"
            case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=value) if not _is_false(value):
                yield value.lineno, str(node.arg)


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_the_tree() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 20
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in unsafe(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal",
        "from dill import loads",
        "from multiprocessing import pickle",
        "def f():\n    import cloudpickle as safe",
        "eval('1')",
        "exec(text)",
        "import builtins\nbuiltins.eval('1')",
        "socket.recv_pyobj()",
        "socket.send_pyobj(x)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=setting)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=setting)",
        "dist.broadcast_object_list(xs)",
    ],
)
def test_each_of_them_is_seen(source: str) -> None:
    assert list(unsafe(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "from_pretrained(name, trust_remote_code=False)",
        "re.compile('x')",
    ],
)
def test_what_is_allowed(source: str) -> None:
    assert not list(unsafe(ast.parse(source)))


def test_no_socket_type_of_zeromq_but_those_of_the_link() -> None:
    """The links judge every address; so nobody else in the product has a ZeroMQ socket."""
    # The simulator's daemon is a stand-in for a worker, in a process of its own; it only connects.
    users = {
        str(path.relative_to(ROOT))
        for folder in ("shared", "kernels", "worker", "controller")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "zmq" in {*[n.name.split(".")[0] for n in node.names], (getattr(node, "module", None) or "").split(".")[0]}
    }
    assert users - {"controller/simulate/fake_daemon.py"} == {
        "controller/link.py",
        "controller/link_watch.py",
        "controller/zap.py",
        "worker/link.py",
    }


def test_defaults_stay_on_this_machine() -> None:
    """Every address that is bound unless somebody says otherwise is loopback."""
    from kilburn.shared import config
    from kilburn.shared.keys import checked_endpoint

    assert checked_endpoint(config.DEFAULT_ENDPOINT, False, "bind") == config.DEFAULT_ENDPOINT
    assert config.ControllerSettings().host == "127.0.0.1"
    assert config.GatewaySettings().host == "127.0.0.1"
