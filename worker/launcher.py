"""How the engine is started: as one process, as several on this machine, or as those of one node of several.

``torchrun`` starts the processes and takes them along when one of them ends. It never starts them again in place
(``--max-restarts 0``): the next attempt is a fresh launch, which goes on behind the last saved block.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from api.settings import Settings

TORCHRUN = ("-m", "torch.distributed.run")


@dataclass(frozen=True)
class Node:
    """Node ``rank`` of ``count`` that do the job ``run_id`` together; the first one is met at ``host``, ``port``."""

    rank: int
    count: int
    host: str
    port: int
    run_id: str


def engine_argv(settings: Settings, node: Node | None = None) -> list[str]:
    """The engine's command line without its last argument, the task file."""
    found: list[str] = []
    for part in shlex.split(settings.engine_command):
        found += launcher(settings.engine_ranks, node) if part == "{launcher}" else [part]
    return [part.replace("{python}", sys.executable) for part in found]


def launcher(num_ranks: int, node: Node | None) -> list[str]:
    """What stands between ``python`` and the engine's module, for ``num_ranks`` processes on this machine.

    Nodes meet under numbers that they are given: the first process must be the leader's, which writes the result.
    """
    if node is not None:
        where = [
            *("--nnodes", str(node.count), "--node-rank", str(node.rank), "--rdzv-backend", "static"),
            *("--rdzv-id", node.run_id, "--master-addr", node.host, "--master-port", str(node.port)),
        ]
    elif num_ranks > 1:
        where = ["--standalone"]
    else:
        return []
    return [*TORCHRUN, *where, "--nproc-per-node", str(num_ranks), "--max-restarts", "0"]
