"""The modules of the project and their syntax trees."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_LINES_LIMIT = 450
NUM_FUNCTION_LINES_LIMIT = 80
PACKAGES = ("quantcore", "api", "worker", "bitfoundry", "migrations")


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


MODULES = {module_name(path): path for path in sources()}
