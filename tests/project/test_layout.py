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

from ..helpers.paths import ROOT

pytestmark = pytest.mark.quick

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
PURE = ("scoring/features.py", "compaction/budget.py", "compaction/selection.py")
#: Floors of gatesight_hf, from the ground up: a room imports only from those below its own.
FLOORS = (
    ("errors",), ("checks",), ("files",), ("reference",), ("entries",), ("models",), ("scoring",), ("compaction",),
    ("cache",), ("methods",), ("view",), ("session",), ("vllm",), ("training",), ("commands",),
)  # fmt: skip
#: Packages whose __init__.py does more than say what is inside, and what else it may hold: vLLM's entry point must not
#: import vLLM, and the reference model is loaded by two functions and their paths.
LOGIC = {
    "gatesight_hf/vllm/__init__.py": {"TYPE_CHECKING", "_registered", "register", "__getattr__"},
    "gatesight_hf/reference/__init__.py": {
        "MODEL_PATH", "ESTIMATOR_PATH", "load_model", "load_tokenizer", "_check_folder",
    },
}  # fmt: skip
FILE_LINES, CLASS_LINES = 350, 250
#: Files and classes (`cache/cache.py`, `GateSightCache`) that may be longer: none.
LONGER: set[str] = set()
EVALUATOR_ENTRIES = 10


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
    found = [path for path in paths if path.stem in TAKEN and path.suffix in ("", ".py")]
    # Folders of tests have the names of what they test. They would shadow it only for a program in `tests` itself.
    assert not [path for path in found if not (path.parent == ROOT / "tests" and path.is_dir())]
    assert [path.name for path in (ROOT / "tests").glob("*.py")] == ["conftest.py"]


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
    names = ours(imports_of(PACKAGES["gatesight_hf"] / module, "gatesight_hf", lazy=True))
    assert not {name for name in names if not name.startswith("gatesight_kernels.")}


def test_the_command_line_imports_lazily():
    path = PACKAGES["gatesight_hf"] / "commands" / "cli.py"
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


# -- floors of the library, rooms of the evaluator ---------------------------------------------------------------------


def rooms(package: str) -> dict[str, set[str]]:
    """Which rooms (folders and modules at the top) each room of a package imports, lazily too."""
    top, found = PACKAGES[package], {}
    for path in top.rglob("*.py"):
        room = path.relative_to(top).parts[0].removesuffix(".py")
        parts = [name.split(".") for name in imports_of(path, package, lazy=True)]
        others = {name[1] for name in parts if name[0] == package and len(name) > 1 and name[1] != "__version__"}
        found.setdefault(room, set()).update(others - {room})
    return found


def test_every_room_of_the_library_imports_only_from_floors_below():
    graph = rooms("gatesight_hf")
    assert set(graph) - {"__init__"} == {room for floor in FLOORS for room in floor}
    below: set[str] = set()
    for floor in FLOORS:
        for room in floor:
            assert graph[room] <= below, f"{room} imports {graph[room] - below}, which is not below it"
        below |= set(floor)


def test_rooms_of_the_evaluator_have_no_cycle_and_are_few():
    graphlib.TopologicalSorter(rooms("gatesight_eval")).prepare()
    entries = [path.name for path in PACKAGES["gatesight_eval"].iterdir() if path.name != "__pycache__"]
    assert len(entries) <= EVALUATOR_ENTRIES, sorted(entries)


def names_of(node: ast.stmt) -> set[str]:
    """What a statement at the top of a module defines; of a condition its text."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {ast.unparse(target) for target in node.targets}
    return {ast.unparse(node.test if isinstance(node, ast.If) else node)}


@pytest.mark.parametrize("package", ["gatesight_hf", "gatesight_eval"])
def test_a_package_says_what_it_is_and_does_nothing(package):
    for path in PACKAGES[package].rglob("__init__.py"):
        docstring, *body = ast.parse(path.read_text(encoding="utf-8")).body
        said = (
            docstring.value.value
            if isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
            else ""
        )
        assert len(str(said).split()) >= 5, path
        rest = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]
        own = {name for node in rest for name in names_of(node)} - {"__all__", "__version__"}
        assert own <= LOGIC.get(path.relative_to(PACKAGES[package].parent).as_posix(), set()), path


def test_files_and_classes_can_be_read_at_once():
    top, longer = PACKAGES["gatesight_hf"], {}
    for path in top.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if len(source.splitlines()) > FILE_LINES:
            longer[path.relative_to(top).as_posix()] = len(source.splitlines())
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno + 1 > CLASS_LINES:
                longer[node.name] = node.end_lineno - node.lineno + 1
    assert set(longer) == LONGER, longer


def test_rooms_of_tests_are_those_of_what_is_tested():
    tested = {path.parent.name for path in PACKAGES["gatesight_hf"].glob("*/__init__.py")}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    # The bundled model and its documents are tested where they are shown, in `commands`.
    assert folders == tested - {"reference"} | {"kernels", "eval", "project"}
