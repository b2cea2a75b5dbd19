"""The architecture, held by its imports: which package may know which, and where a library may be.

Imports inside functions count: what is imported late is known all the same. Those under
TYPE_CHECKING do not: they never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

import kdn

ROOT = Path(kdn.__file__).parent
ORDER = (
    "defaults", "errors", "files", "background", "tracing", "metrics", "checked", "protocol",
    "cache", "request_log", "credentials", "codec", "blend", "config", "store", "depot", "region",
    "node", "delivery", "places", "session", "engines", "client", "__init__", "doctor", "migrate",
    "calibrate", "bench", "cli", "__main__",
)  # fmt: skip
"""Nobody imports what is to the right; so only the command line knows the benchmarks."""

BYTES_ONLY = ("protocol", "config", "store", "depot", "region", "node", "places")
"""They move bytes: no torch, and of the codecs nothing but the container, in a node."""
CONTAINER = ("kdn.codec.header.*", "kdn.codec.format.*")

HOMES = {
    "triton": ("*_triton.py",),
    "transformers": (
        "engines/*.py", "client/engine.py", "bench/gpu_prefill.py", "bench/vllm.py",
        "bench/models/shapes.py", "bench/models/tokenizer.py",
        "cli/demo_text.py", "cli/demo_worker.py",
    ),
    "vllm": ("engines/vllm/*.py", "bench/vllm_worker.py", "bench/vllm_gpu/worker.py"),
}  # fmt: skip


def imported_by(tree: ast.AST) -> Iterator[str]:
    """Modules, or names as `module.name`."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    if isinstance(tree, ast.Import):
        yield from (one.name for one in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        assert tree.level == 0, "expected absolute imports"
        yield from (f"{tree.module}.{one.name}" for one in tree.names)
    for child in ast.iter_child_nodes(tree):
        yield from imported_by(child)


IMPORTS = [
    (path.relative_to(ROOT), path.relative_to(ROOT).parts[0].removesuffix(".py"), imported)
    for path in sorted(ROOT.rglob("*.py"))
    for imported in imported_by(ast.parse(path.read_text()))
]
"""(file, its package, what it imports)."""


def matches(name: object, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(str(name), pattern) for pattern in patterns)


def test_no_import_points_to_the_right() -> None:
    for path, package, imported in IMPORTS:
        if imported.split(".")[0] == "kdn":
            part = f"{imported}.".split(".")[1]
            part = part if part in ORDER else "__init__"  # the front door: `import kdn`
            assert ORDER.index(part) <= ORDER.index(package), f"{path} imports {imported}"


APART = {
    "delivery": ("depot", "region", "node"), "places": ("region", "node"),
    "session": ("depot", "region", "node"),
    "engines": ("depot", "region", "node", "store"),
    "client": ("depot", "region", "node", "store"),
}  # fmt: skip
"""These know nothing of what is named, though it is to their left."""


def test_what_is_apart_stays_apart() -> None:
    for path, package, imported in IMPORTS:
        others = tuple(f"kdn.{other}.*" for other in APART.get(package, ()))
        assert not matches(imported, others), f"{path} imports {imported}"


def test_those_who_move_bytes_know_neither_torch_nor_codecs() -> None:
    for path, package, imported in IMPORTS:
        allowed = CONTAINER if package == "node" else ()
        if package in BYTES_ONLY and not matches(imported, allowed):
            assert not matches(imported, ("torch", "torch.*", "kdn.codec*")), f"{path}: {imported}"


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_stays_at_home(library: str) -> None:
    users = {path for path, _, imported in IMPORTS if imported.split(".")[0] == library}
    assert users, f"expected somebody to import {library}"
    assert not [path for path in users if not matches(path, HOMES[library])]


def test_every_test_for_a_gpu_is_run_on_one() -> None:
    """`make test-gpu` names its files: it must not collect the others, which import more than a
    GPU machine has."""
    root = ROOT.parent
    recipe = (root / "Makefile").read_text().split("\ntest-gpu:")[1].split("\n\n")[0]
    marks = ("pytest.mark.gpu", "test_klt_triton.pytestmark", "    pytestmark,\n")
    marked = [
        path.relative_to(root)
        for path in (root / "tests").rglob("test_*.py")
        if path != Path(__file__) and any(mark in path.read_text() for mark in marks)
    ]
    assert marked
    assert not [str(path) for path in marked if str(path) not in recipe.split()]
