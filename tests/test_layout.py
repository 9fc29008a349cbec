"""The repository's shape is part of the contract: rooms are plain folders, and imports point one way.

A folder or a package that does not exist yet passes.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "eval", "hub_cards", "tests", "examples")
#: Names that a file in a room must not have: a script's folder is the first place where Python looks.
TAKEN = {"accelerate", "datasets", "evaluate", "huggingface_hub", "kernels", "matplotlib", "numpy", "safetensors",
         "tokenizers", "torch", "tqdm", "transformers", "triton", "vllm"}  # fmt: skip
PACKAGES = {
    "gatesight_kernels": ROOT / "kernels" / "gatesight_kernels",
    "gatesight_hf": ROOT / "gatesight_hf",
    "gatesight_eval": ROOT / "eval" / "gatesight_eval",
}
MAY_IMPORT = {
    "gatesight_kernels": set(),
    "gatesight_hf": {"gatesight_kernels"},
    "gatesight_eval": {"gatesight_hf"},
}
#: Modules of gatesight_hf that import nothing of ours but the kernels, not even each other.
PURE = ("features", "budget", "selection")


def module_name(path: Path, package: str) -> str:
    parts = (package, *path.relative_to(PACKAGES[package]).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(node: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    """What runs when a module is imported; with `lazy` also the bodies of functions, and what is there for types."""
    for child in ast.iter_child_nodes(node):
        if lazy or not (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(child)):
            yield child
            yield from statements(child, lazy)


def imports(source: str, module: str, is_package: bool = False, lazy: bool = False) -> set[str]:
    """Absolute names of all that a module imports; `from a import b` counts as `a.b`, which may be a module."""
    names = set()
    for node in statements(ast.parse(source), lazy):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            above = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def imports_of(path: Path, package: str, lazy: bool = False) -> set[str]:
    is_package = path.name == "__init__.py"
    return imports(path.read_text(encoding="utf-8"), module_name(path, package), is_package, lazy)


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b, c", {"a.b", "c"}),
        ("from . import x", {"p.q.x"}),
        ("from .x import y", {"p.q.x.y"}),
        ("from ..x import y", {"p.x.y"}),
        ("try:\n    import a\nexcept ImportError:\n    import b", {"a", "b"}),
        ("def f():\n    import a", set()),
        ("if TYPE_CHECKING:\n    import a", set()),
    ],
)
def test_imports_are_read_right(source, expected):
    assert imports(source, "p.q.m") == expected
    assert imports(source, "p.q", is_package=True) == expected


def test_lazy_imports_are_read_too():
    assert imports("def f():\n    import a\nif TYPE_CHECKING:\n    import b", "p", lazy=True) == {"a", "b"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_not_a_package(room):
    assert not (ROOT / room / "__init__.py").exists(), f"{room}/__init__.py would shadow another module named {room!r}"


def test_nothing_inside_a_room_shadows_a_dependency():
    paths = [path for room in ROOMS if (ROOT / room).is_dir() for path in (ROOT / room).rglob("*")]
    assert not [path for path in paths if path.stem in TAKEN and path.suffix in ("", ".py")]


def test_transformers_imports_from_the_repository_root():
    code = "import sys, transformers.integrations.hub_kernels; print(sys.modules.get('kernels'))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert str(ROOT / "kernels") not in out


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package):
    for path in PACKAGES[package].rglob("*.py"):
        packages = {name.split(".")[0] for name in ours(imports_of(path, package))} - {package}
        assert packages <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {packages - MAY_IMPORT[package]}"


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_nothing_of_ours_but_kernels(module):
    for path in PACKAGES["gatesight_hf"].glob(f"{module}.py"):
        names = ours(imports_of(path, "gatesight_hf", lazy=True))
        assert not {name for name in names if not name.startswith("gatesight_kernels.")}


def test_the_command_line_imports_lazily():
    for path in PACKAGES["gatesight_hf"].glob("cli.py"):
        assert ours(imports_of(path, "gatesight_hf")) <= {"gatesight_hf.__version__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_each_other_without_a_cycle(package):
    files = {module_name(path, package): path for path in PACKAGES[package].rglob("*.py")}
    graph = {module: set() for module in files}
    for module, path in files.items():
        for name in ours(imports_of(path, package)) - {f"{package}.__version__"}:
            other = name if name in files else name.rpartition(".")[0]
            if other in files and other != module:
                graph[module].add(other)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
