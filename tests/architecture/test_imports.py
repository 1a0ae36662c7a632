"""Who may import whom: shared <- kernels <- worker, shared <- controller/core <- controller, downwards in the core."""

import sys

import pytest

from tests.architecture.source import imports, inside, modules, own_imports

# Who plays a service in the simulator has the decisions of gateways, what they read, and what clients are told.
PLAYED = ("controller.simulate", "controller.gateway", "controller.registry", "controller.registry_redis",
          "controller.api", "controller.core", "shared")  # fmt: skip

# What each part may import of the product. The first row that fits a module counts.
MAY_IMPORT = {
    "shared": ("shared",),
    "kernels": ("kernels", "shared.layout"),
    "worker": ("worker", "kernels", "shared"),
    "controller.core": ("controller.core", "shared"),
    **{f"controller.simulate.{name}": PLAYED for name in ("customers", "front", "network", "service", "site")},
    "controller.simulate": ("controller.simulate", "controller.core", "shared"),
    "controller": ("controller", "shared"),
}

# What each part may import of other people's packages, beside the standard library; None: whatever it needs.
OTHERS: dict[str, tuple[str, ...] | None] = {
    "shared": ("msgpack",),
    "kernels": ("torch", "triton", "numba", "llvmlite", "numpy"),
    "worker": None,
    "controller.core": (),
    "controller.app": ("aiohttp", "opentelemetry"),  # which is named there for its type, and imported by nobody unasked
    "controller.tracing": ("opentelemetry",),
    "controller.capacity_plot": ("matplotlib",),  # when somebody asks for a drawing
    "controller.grammar_check": ("llguidance",),  # a process of its own
    "controller": ("aiohttp", "jinja2", "msgpack", "prometheus_client", "redis", "rich", "tokenizers", "yarl", "zmq"),
}

# The core, from the top down. A module imports only from layers below its own.
CORE_LAYERS = (
    ("engine",),
    ("requests",),
    ("block_map", "door", "homeless"),
    ("pinning", "snapshot", "limits", "settings"),
    ("placement",),
    ("home",),
    ("scheduler", "lease", "ranks"),
    ("admission", "commit", "laws", "waste", "leaving"),
    ("lineup", "step"),
    ("turns",),
    ("forming", "pacing", "fairness", "grammars", "blame"),
    ("policy", "beam", "prefixes"),
    ("memory",),
    ("sequence",),
    ("block_table",),
    ("prefix_index",),
    ("block_pool",),
    ("events", "histogram", "departure"),
)


def row_of(name: str, table: dict[str, tuple[str, ...]] | dict[str, tuple[str, ...] | None]) -> str:
    return next(part for part in table if inside(name, part))


@pytest.mark.parametrize("name", modules())
def test_imports_only_what_its_part_may(name: str) -> None:
    allowed = MAY_IMPORT[row_of(name, MAY_IMPORT)]
    wrong = [
        f"line {line}: {target}"
        for target, line in imports(name, modules()[name])
        if target.startswith("(relative")
        or (
            inside(target, "kilburn")
            and target != "kilburn"
            and not any(
                inside(target.removeprefix("kilburn."), part) or inside(f"kilburn.{part}", target) for part in allowed
            )
        )
    ]
    assert not wrong


@pytest.mark.parametrize("name", modules())
def test_other_packages_are_those_that_its_part_was_given(name: str) -> None:
    allowed = OTHERS[row_of(name, OTHERS)]
    used = {target.split(".")[0] for target, _ in imports(name, modules()[name])} - {"kilburn"}
    foreign = {package for package in used if package not in sys.stdlib_module_names}
    assert allowed is None or foreign <= set(allowed)


def core_depth(name: str) -> int:
    depths = {f"controller.core.{word}": depth for depth, layer in enumerate(CORE_LAYERS) for word in layer}
    assert name in depths, f"{name} has no place in CORE_LAYERS: give it one"
    return depths[name]


def test_inside_the_core_imports_go_down_only() -> None:
    core = [name for name in modules() if inside(name, "controller.core") and name != "controller.core"]
    wrong = [
        f"{name} imports {target}"
        for name in core
        for target in own_imports(name)
        if inside(target, "controller.core") and target != "controller.core" and core_depth(target) <= core_depth(name)
    ]
    assert not wrong


def test_nothing_of_the_product_imports_tests_or_benchmarks() -> None:
    for name, tree in modules().items():
        for target, line in imports(name, tree):
            assert not inside(target, "tests"), f"{name}:{line}"
            assert not inside(target, "bench"), f"{name}:{line}"
