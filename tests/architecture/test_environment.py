"""Nothing is written to the environment once there are threads: libpq and others read it in theirs, without a lock.

libc's ``setenv`` may move the environment while another thread's ``getenv`` walks through it, which ends the process
about once in a thousand starts (SIGSEGV). Here are the places in our sources; what libraries do is watched in the
processes themselves (tests/integration/test_environment.py).
"""

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.sources import MODULES, tree_of

KNOWN = {
    "a command writes it before anything else": {"quantcore.cli.main": 1},
    "a child that was forked with one thread": {"quantcore.cli.readers": 1},
    "a process for this script alone, before it loads the program that has threads": {
        "quantcore.serving.inside_env": 1,
        "quantcore.serving.vllm_tasks": 1,
    },
    "a command that a person starts, with no thread that asks a database": {"quantcore.engine.selftest.trial_job": 3},
}
CHANGES = ("update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__")


def is_environment(node: ast.AST) -> bool:
    return ast.unparse(node) in ("os.environ", "environ", "os.environb")


def writes(tree: ast.Module) -> Iterator[str]:
    """The statements that change the environment, as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and is_environment(node.value):
            yield ast.unparse(node)
        elif isinstance(node, ast.AugAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (ast.unparse(node) for target in targets if is_environment(target))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changes = node.func.attr in CHANGES and is_environment(node.func.value)
            if changes or node.func.attr in ("putenv", "unsetenv"):
                yield ast.unparse(node)


def test_every_write_to_the_environment_is_known() -> None:
    known = Counter({module: number for places in KNOWN.values() for module, number in places.items()})
    found = {module: [*writes(tree_of(path))] for module, path in MODULES.items() if not module.startswith("tests")}
    assert {module: len(calls) for module, calls in found.items() if calls} == known, found


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("os.environ['A'] = 'b'", 1),
        ("del os.environ['A']", 1),
        ("os.environ |= {}", 1),
        ("os.environ.update(a='b'); os.environ.setdefault('a', 'b')", 2),
        ("os.putenv('a', 'b')", 1),
        ("name = os.environ['A']; os.environ.get('A'); x = os.environ | {}", 0),
    ],
)
def test_a_write_is_seen(code: str, number: int) -> None:
    """The test above can fail."""
    assert len([*writes(ast.parse(code))]) == number
