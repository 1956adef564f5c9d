"""Starts the engine as one process, as several on this machine, or as one node of several.

``torchrun`` starts the processes and ends them all when one of them ends. It never restarts them in place
(``--max-restarts 0``): the next attempt is a fresh launch, which resumes after the last saved block.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from api.settings import Settings

TORCHRUN = ("-m", "torch.distributed.run")


@dataclass(frozen=True)
class Node:
    """Node ``rank`` of the ``count`` that run ``run_id`` together; its first process listens at ``host``, ``port``."""

    rank: int
    count: int
    host: str
    port: int
    run_id: str


def engine_argv(settings: Settings, node: Node | None = None) -> list[str]:
    """Return the engine's command line without its last argument, the task file."""
    parts: list[str] = []
    for part in shlex.split(settings.engine_command):
        parts += torchrun(settings.engine_ranks, node) if part == "{launcher}" else [part]
    return [part.replace("{python}", sys.executable) for part in parts]


def torchrun(num_ranks: int, node: Node | None) -> list[str]:
    """Return the arguments between ``python`` and the engine's module, for ``num_ranks`` processes on this machine.

    Nodes get fixed ranks: the first process must be the leader's, which writes the result.
    """
    if node is not None:
        rendezvous = [
            *("--nnodes", str(node.count), "--node-rank", str(node.rank), "--rdzv-backend", "static"),
            *("--rdzv-id", node.run_id, "--master-addr", node.host, "--master-port", str(node.port)),
        ]
    elif num_ranks > 1:
        rendezvous = ["--standalone"]
    else:
        return []
    return [*TORCHRUN, *rendezvous, "--nproc-per-node", str(num_ranks), "--max-restarts", "0"]
