"""Who may import whom, read from the source; that nothing goes in circles; that torch stays unloaded where it must."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.sources import MODULES, NUM_FUNCTION_LINES_LIMIT, NUM_LINES_LIMIT, PACKAGES, ROOT, tree_of

WALL = ("quantcore.engine", "quantcore.tensors", "quantcore.nn")
"""What computes with models and tensors. Everything else loads without torch."""
BEHIND = ("quantcore.engine", "quantcore.nn", "quantcore.cli")
"""What may import the engine; for the rest of quantcore that would be upwards."""

ALLOWED: dict[str, set[str]] = {
    "quantcore": set(),
    "api": {"quantcore"},
    "api.store": {"quantcore.errors", "quantcore.events", "quantcore.config"},
    "worker": {"api.store", "api.confinement", "api.disk", "api.settings", "api.json_log", "api.tracing", "quantcore"},
    "migrations": {"api.store", "quantcore.config"},
    "bitfoundry": {"quantcore"},
    "bitfoundry.client": set(),
    "bitfoundry.commands.submission": {"worker.allocation", "quantcore"},
    "bitfoundry.local.backup": {"api.store.vault", "quantcore"},
    "bitfoundry.local.stack": {
        "api.store.migrate",
        "api.store.vault",
        "api.http.security",
        "api.settings",
        "quantcore",
    },
}
"""Package or module -> what of ours it may import besides itself, never what lies behind the wall. The longest
matching name decides."""

PLUG_INS = (
    "quantcore.engine.observers",
    "quantcore.engine.solvers",
    "quantcore.engine.transforms",
    "quantcore.formats",
    "quantcore.export",
)


def imports(module: str, *, at_import: bool = False) -> set[str]:
    """Modules of ours that `module` imports; with `at_import` only those that load as soon as it does."""
    path = MODULES[module]
    found: set[str] = set()
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)  # what only a type checker reads is no dependency
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            base = node.module or ""
            found |= {name if (name := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
        waiting.extend(ast.iter_child_nodes(node))
    return {name for name in found if name.split(".")[0] in PACKAGES} - {module}


def lies_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def forbidden(module: str, imported: set[str]) -> list[str]:
    """'module imports name' for each name that no rule allows."""
    rule = max((name for name in ALLOWED if lies_in(module, name)), key=len)
    own = "api.store" if rule == "api.store" else module.split(".")[0]
    allowed = ALLOWED[rule] | {own}
    faults = {name for name in imported if not any(lies_in(name, one) for one in allowed)}
    if own != "quantcore":  # the service and its clients
        faults |= {name for name in imported if any(lies_in(name, one) for one in WALL)}
    elif not any(lies_in(module, one) for one in BEHIND):
        faults |= {name for name in imported if lies_in(name, "quantcore.engine") or lies_in(name, "quantcore.nn")}
    return [f"{module} imports {name}" for name in sorted(faults)]


def test_modules_import_only_what_they_may() -> None:
    assert_none([fault for module in MODULES for fault in forbidden(module, imports(module))])


def test_a_forbidden_import_is_seen() -> None:
    """The test above can fail."""
    names = {"api.store.ids", "api.main", "quantcore.errors", "quantcore.engine.pipeline.job"}
    assert forbidden("api.store.ids", names) == [
        "api.store.ids imports api.main",
        "api.store.ids imports quantcore.engine.pipeline.job",
    ]
    assert forbidden("api.main", {"quantcore.tensors.sink"}) == ["api.main imports quantcore.tensors.sink"]
    assert forbidden("quantcore.plan.planner", {"quantcore.engine.model.experts"})
    assert not forbidden("quantcore.cli.main", {"quantcore.engine.model.experts", "quantcore.plan.planner"})


def assert_none(faults: list[str]) -> None:
    """Raises AssertionError with a line for each fault."""
    assert not faults, "\n".join(faults)


def folder_of(module: str) -> str:
    """The folder in which a module lies; for a file in the root of a package the module itself."""
    is_folder = MODULES[module].name == "__init__.py"
    return module if is_folder or module.count(".") == 1 else module.rpartition(".")[0]


def test_folders_do_not_import_each_other_in_circles() -> None:
    """Imports inside functions count as well. Each file in the root of a package counts as a folder of its own."""
    folders: dict[str, set[str]] = {}
    for module in MODULES.keys() - set(PACKAGES):
        targets = {folder_of(name) for name in imports(module) if name in MODULES}
        folders.setdefault(folder_of(module), set()).update(targets - {folder_of(module)})
    assert_no_circle(folders)


def test_the_root_of_the_engine_holds_only_what_everybody_needs() -> None:
    files = {path.name for path in (ROOT / "quantcore").glob("*.py")}
    assert files == {"__init__.py", "__main__.py", "errors.py", "events.py", "registry.py"}


def test_plug_ins_do_not_know_each_other() -> None:
    def room(module: str) -> str | None:
        return next((name for name in PLUG_INS if module.startswith(f"{name}.")), None)

    for module in MODULES:
        for imported in imports(module) if room(module) else ():
            assert room(imported) in (None, room(module), "quantcore.formats"), f"{module} imports {imported}"
    assert all(any(room(module) == name for module in MODULES) for name in PLUG_INS)


def test_nothing_goes_in_circles() -> None:
    """Packages count as their __init__; imports inside functions do not close a circle at load time."""
    assert_no_circle({module: imports(module, at_import=True) & MODULES.keys() for module in MODULES})


def assert_no_circle(edges: Mapping[str, set[str]]) -> None:
    """Raises AssertionError with the path of a circle."""
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> None:
        assert node not in path, " -> ".join((*path[path.index(node) :], node))
        if node in done:
            return
        for target in sorted(edges.get(node, ())):
            visit(target, (*path, node))
        done.add(node)

    for node in edges:
        visit(node, ())


def test_a_circle_is_seen() -> None:
    """The checks above can fail."""
    with pytest.raises(AssertionError, match="a -> b -> a"):
        assert_no_circle({"a": {"b"}, "b": {"a"}, "c": {"a"}})


HEAVY = ("torch._C", "transformers", "numpy", "pyarrow", "datasets")


def loaded_after(watched: tuple[str, ...], *modules: str) -> list[str]:
    """'module: what is loaded' for those that load something, in one process: of several the first one is named."""
    code = (
        "import os, sys, importlib\n"
        "os.environ.update(DATABASE_URL='postgresql+psycopg://x@/x', BROKER_URL='memory://')\n"
        "os.environ.update(BITFOUNDRY_DATA_DIR='/tmp')\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        f"    for name in {watched!r}:\n"
        "        if name in sys.modules:\n"
        "            print(f'{module}: {name}')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_torch_stays_behind_the_wall() -> None:
    """Every module outside is loaded, in one process, but for scripts: those run when they load."""
    outside = [name for name in MODULES if not any(lies_in(name, wall) for wall in (*WALL, "migrations"))]
    assert loaded_after(HEAVY, *(name for name in sorted(outside) if not name.endswith("__main__"))) == []


def test_the_watch_sees_torch() -> None:
    """The test above can fail."""
    assert loaded_after(HEAVY, "json", "numpy") == ["numpy: numpy"]


def test_help_loads_no_client() -> None:
    """The answers of the service, and HTTP, take half of the time in which the commands would else start."""
    assert loaded_after(("pydantic", "httpx2", "bitfoundry.client.answers"), "bitfoundry.commands.main") == []


def test_the_client_loads_no_server() -> None:
    servers = ("fastapi", "starlette", "sqlalchemy", "celery", "alembic", "redis", "psycopg", "quantcore", "api")
    assert loaded_after(servers, "bitfoundry.client.service", "bitfoundry.commands.main") == []


def test_the_store_loads_no_web_framework() -> None:
    assert loaded_after(("fastapi", "starlette"), "api.store.queue.jobs") == []


def test_every_package_is_ours() -> None:
    """Another distribution with a top-level package of our name would win over us in some ways of starting Python."""
    for package in PACKAGES[:-1]:
        found = __import__(package).__file__
        assert found is not None
        assert Path(found).is_relative_to(ROOT), found


def too_long(module: str, text: str) -> Iterator[str]:
    """'module has so many lines', and the same of each function. Migrations are lists of tables and may be long."""
    if (num_lines := len(text.splitlines())) > NUM_LINES_LIMIT:
        yield f"{module} has {num_lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ".versions." not in module:
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > NUM_FUNCTION_LINES_LIMIT:
                yield f"{module}: {node.name} has {length} lines"


def test_files_and_functions_are_short() -> None:
    assert_none([fault for module, path in MODULES.items() for fault in too_long(module, path.read_text())])


def test_what_is_too_long_is_seen() -> None:
    """The test above can fail."""
    text = "def f():\n" + "    x = 1\n" * NUM_LINES_LIMIT
    faults = [*too_long("m", text)]
    assert faults == [f"m has {NUM_LINES_LIMIT + 1} lines", f"m: f has {NUM_LINES_LIMIT + 1} lines"]


def test_modules_have_names_that_say_something() -> None:
    assert not [module for module in MODULES if module.split(".")[-1] in {"utils", "helpers", "common", "misc"}]


def test_public_modules_say_what_they_are() -> None:
    silent = [name for name, path in MODULES.items() if path.stat().st_size and not ast.get_docstring(tree_of(path))]
    assert [name for name in silent if not name.startswith("migrations.versions")] == []
