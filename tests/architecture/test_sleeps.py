"""Tests wait for conditions (``tests.support.waiting``); every other pause is known, with its reason."""

import ast
from collections import Counter

from tests.support.sources import ROOT, tree_of

TESTS = ROOT / "tests"
KNOWN = {
    "the helper itself": {"support/waiting": 2},
    "stand-ins that are slow because they shall be": {
        "support/stub_engine": 10,
        "support/receiver": 1,
        "support/lying_oidc": 1,
        "support/hostile_engine": 1,
    },
    "one try after the other of something that may not work yet": {
        "e2e/test_real_engine": 1,
        "integration/test_async_client": 1,
        "integration/test_hub_jobs": 1,
        "integration/test_retention": 1,
        "integration/test_soak": 1,
        "support/crowd": 2,
        "support/service": 1,
        "support/slurm": 1,
        "unit/bitfoundry/local/test_postgres": 1,
    },
    "what is sent or done slowly, that being the case in hand": {
        "integration/test_api_stream": 2,
        "integration/test_faults_api": 2,
        "integration/test_faults_database": 8,
        "integration/test_connection_limits": 2,
        "integration/test_killed_upload": 1,
        "unit/bitfoundry/local/test_backup": 2,
    },
    "time that has to pass to be counted": {
        "integration/test_api_control": 1,
        "integration/test_faults_broker": 1,
        "integration/test_leases": 1,
        "unit/api/store/test_ids": 1,
    },
    "no time at all: others have their turn": {
        "integration/test_artifacts": 1,
        "unit/api/http/test_event_stream": 2,
        "unit/api/http/test_turns": 1,
    },
}
FOLDERS = ("architecture", "attack", "conformance", "consumers", "e2e", "integration", "support", "unit")


def sleeps(tree: ast.Module) -> int:
    """The number of calls of a function called ``sleep``."""
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sum(name.rpartition(".")[2] == "sleep" for name in calls)


def test_every_pause_is_known() -> None:
    known = Counter({name: number for places in KNOWN.values() for name, number in places.items()})
    found = Counter({
        path.relative_to(TESTS).with_suffix("").as_posix(): number
        for folder in FOLDERS
        for path in (TESTS / folder).rglob("*.py")
        if (number := sleeps(tree_of(path)))
    })  # fmt: skip
    assert found == known, "wait with tests.support.waiting, or give the pause a reason here"


def test_a_pause_is_seen() -> None:
    """The test above can fail."""
    assert sleeps(ast.parse("import time\ntime.sleep(1)\nasyncio.sleep(2)\nsleep(3)\nwait_until(print)")) == 3
