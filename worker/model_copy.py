"""Copies a model from its object store to this machine, in a process of its own.

That process has the keys of the store, and reads none of the model's files but the list of its shards. The engine that
reads them has no keys and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

from api import confinement
from api.settings import Settings
from quantcore.hub import object_store
from quantcore.hub.names import store_name
from worker.engine import Child, engine_environment
from worker.memory_watch import MemoryLimit


def start_copy(settings: Settings, url: str, sha: str, folder: Path, limit: MemoryLimit) -> Child:
    """Start the process that copies the model at ``url`` into ``folder``, under its own name.

    It fails unless the files are those of ``sha``. No engine may have been able to write to the folder. Raises
    ModelError ``model_url_not_allowed``.
    """
    settings.check_model_url(url)
    argv = [sys.executable, "-m", "quantcore", "fetch", url, sha, str(folder / store_name(url))]
    environment = engine_environment(settings, with_hub=True) | object_store.key_variables()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if settings.confine_engine:
        own = object_store.key_files()
        reach = confinement.reach_of(settings, folder, {}, with_hub=False, with_store=True, own=own)
        argv, environment = reach.command(argv), environment | reach.environment()
    return Child(settings, argv, environment, limit=limit)
