"""``python -m api fsck``: checks now everything that is stored, and prints the faults.

It changes no row but those of its own findings. With ``--repair`` it removes files that are a day old and that no row
names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from api.integrity import check
from api.settings import Settings
from api.store.engine import Sessions, connect, dispose
from api.store.queue import integrity
from api.store.queue.integrity import Finding, Thing
from api.store.tables.jobs import Artifact, Dataset


def run(settings: Settings, *, repair: bool, as_json: bool) -> int:
    """Check everything and print the faults. Returns the exit status, 0 if there are none."""
    sessions = connect(settings.database_url.get_secret_value(), pool_size=1)
    try:
        num_checked = 0
        for thing in _things(sessions):
            num_checked += 1
            findings = check.check(thing, settings, lambda num_bytes: None)
            with sessions.begin() as session:
                integrity.record_check(session, thing, findings)
        removed = (
            [finding for finding in check.survey(settings, sessions) if finding.kind == "orphan"] if repair else []
        )
        if removed:
            check.remove_orphans(settings, sessions)
        with sessions.begin() as session:
            integrity.record_survey(session, check.survey(settings, sessions))
        with sessions.begin() as session:
            left = integrity.find_all(session)
    finally:
        dispose(sessions)
    _print(num_checked, left, [finding for finding in removed if finding not in left], as_json)
    return 1 if left else 0


def _things(sessions: Sessions) -> Iterator[Thing]:
    for table in (Artifact, Dataset):
        after = ""
        while True:
            with sessions.begin() as session:
                rows = integrity.page(session, table, after)
            if not rows:
                break
            yield from rows
            after = rows[-1].id


def _print(num_checked: int, left: list[Finding], removed: list[Finding], as_json: bool) -> None:
    if as_json:
        shown = {"findings": [asdict(finding) for finding in left], "removed": [finding.path for finding in removed]}
        print(json.dumps({"num_checked": num_checked} | shown, indent=1))
        return
    for finding in left:
        print(f"{finding.kind:8} {finding.path}: {finding.detail}")
    for finding in removed:
        print(f"removed  {finding.path}")
    print(f"{num_checked} artifacts and datasets checked: {len(left)} findings, {len(removed)} files removed.")
