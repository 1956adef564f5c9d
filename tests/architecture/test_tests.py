"""How the tests are laid out: helpers in one place, unit tests where their sources are, helpers with types."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import ROOT, tree_of

TESTS = ROOT / "tests"
PROGRAMS = ("tests.faults", "tests.soak", "tests.sweep")
"""Packages that are run by themselves, and have tests of their own elsewhere."""
THEMES = {
    "quantcore/checkpoint/test_bad_model_files": "config and tokenizer files, through every reader",
    "quantcore/checkpoint/test_safetensors": "headers, source and sink together",
    "quantcore/formats/test_formats": "every registered format",
    "quantcore/tensors/test_pieces": "every calculation that works piece by piece",
    "quantcore/importing/test_odd_tensors": "every reader of quantized files, and the plan",
    "quantcore/engine/solvers/test_solvers": "every registered solver",
    "quantcore/engine/transforms/test_transforms": "every registered smoothing",
}
"""Unit tests that are about several files of a folder, with what joins them."""


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of the tests that a file imports, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module or ""]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "tests")


def is_test_or_conftest(module: str) -> bool:
    return any(part == "conftest" or part.startswith("test_") for part in module.split("."))


def misplaced_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    """What a file of ``tests`` may not import: tests, conftests, and helpers that lie in another test folder."""
    allowed = ("tests.support", ".".join(path.relative_to(ROOT).parent.parts), *PROGRAMS)
    for module in imported(tree):
        if is_test_or_conftest(module) or (
            module != "tests" and not any(f"{module}.".startswith(f"{folder}.") for folder in allowed)
        ):
            yield f"{path.relative_to(ROOT)} imports {module}"


def test_helpers_lie_in_one_place() -> None:
    paths = TESTS.rglob("*.py")
    assert [fault for path in sorted(paths) for fault in misplaced_imports(path, tree_of(path))] == []


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        ("from tests.integration.test_worker import outcomes", True),
        ("from tests.integration import test_worker", True),
        ("def late():\n    import tests.integration.conftest", True),
        ("from tests.browser.pictured_rows import NOW", True),
        ("from tests.support.models import tiny_model", False),
        ("from tests.support import models", False),
    ],
)
def test_a_misplaced_import_is_seen(code: str, is_refused: bool) -> None:
    """The test above can fail."""
    faults = [*misplaced_imports(TESTS / "integration" / "test_new.py", ast.parse(code))]
    assert bool(faults) == is_refused, faults


def test_attacks_are_ordered_by_what_they_attack() -> None:
    """The letters of the threat model: models, sharing, dependencies, rights, errors."""
    names = [path.stem for path in (TESTS / "attack").glob("*.py") if path.name != "conftest.py"]
    assert names and [name for name in names if not re.fullmatch("test_[a-e]_[a-z_]+", name)] == []


def has_source(path: Path) -> bool:
    """True for a unit test that lies where its source does."""
    place = path.relative_to(TESTS / "unit")
    source = ROOT / place.with_name(path.name.removeprefix("test_"))
    return source.exists() or place.with_suffix("").as_posix() in THEMES


def test_unit_tests_mirror_the_sources() -> None:
    packages = ("quantcore", "api", "bitfoundry", "worker")
    paths = [path for package in packages for path in (TESTS / "unit" / package).rglob("test_*.py")]
    assert [str(path.relative_to(ROOT)) for path in sorted(paths) if not has_source(path)] == []
    assert not [theme for theme in THEMES if not (TESTS / "unit" / f"{theme}.py").exists()]
    assert not has_source(TESTS / "unit" / "quantcore" / "test_solvers.py")  # the check can fail


def untyped(tree: ast.Module) -> Iterator[str]:
    """'name: argument' for what has no type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
            missing = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            yield from (f"{node.name}: {name}" for name in missing + ["return"] * (node.returns is None))


def test_helpers_have_types() -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in sorted((TESTS / "support").rglob("*.py"))
        for fault in untyped(tree_of(path))
    ]
    assert faults == []


def test_a_missing_type_is_seen() -> None:
    """The test above can fail."""
    code = "def double(x, *more: int, deep: bool = False):\n    def inner(self) -> int: ..."
    assert [*untyped(ast.parse(code))] == ["double: x", "double: return"]
