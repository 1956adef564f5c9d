"""Jobs that have succeeded without an engine: their artifact has the files that a test needs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from api.settings import Settings
from api.store import manifest
from api.store.engine import Sessions
from api.store.queue import leases


def succeed_with(files: dict[str, bytes], job_id: str, settings: Settings, sessions: Sessions) -> None:
    """Let the job, the next one in the queue, succeed with these files in its artifact."""
    folder = settings.artifacts_dir / job_id / "x"
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    entries = [
        {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    ]
    (folder / manifest.MANIFEST).write_text(json.dumps({"format": 1, "files": entries}))
    contents = manifest.read(folder)
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        assert lease
        done: dict[str, Any] = {"manifest_sha256": contents.sha256, "num_bytes": contents.num_bytes, "summary": {}}
        leases.succeed(session, lease, path=str(folder), **done)
