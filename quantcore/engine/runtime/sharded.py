"""Blocks that do not fit one device: their linear layers are divided into shards of rows, one on each rank (FSDP2).

``torch.distributed.fsdp.fully_shard`` (PyTorch FSDP, Zhao et al. 2023) gathers the weight of a layer right before that
layer runs and drops it right after: at any time a rank holds its shards and one whole layer. All ranks gather together,
so each must run every such layer equally often, in the same order. So experts without tokens run on empty inputs, and
a rank with fewer windows than others runs the block on a window that does not count (see ``Hidden.idle``).

All code that reads or changes a weight uses ``quantcore.engine.runtime.shards``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from quantcore.engine.model.experts import SplitExperts
from quantcore.engine.model.stacks import OneByOne
from quantcore.engine.runtime.devices import free_memory_bytes
from quantcore.engine.runtime.ranks import Ranks
from quantcore.engine.runtime.shards import is_sharded, local_rows, whole
from quantcore.errors import ConfigError
from quantcore.tensors.qtensor import check_finite, is_finite

SHARDED = (nn.Linear,)


def sharing_ranks(
    shard_blocks: bool | None, memory_bytes: Mapping[str, int], ranks: Ranks, device: torch.device
) -> Ranks | None:
    """Return the ranks among which every block is sharded; None if each holds whole blocks.

    ``shard_blocks`` is the task's option. None decides by the planned memory and the devices' free memory. Raises
    ConfigError ``unsupported_config`` if there is only one process.
    """
    if shard_blocks is None:
        is_short = any(ranks.gather(sum(memory_bytes.values()) > free_memory_bytes(device)))
        return ranks if ranks.size > 1 and is_short else None
    if shard_blocks and ranks.size == 1:
        raise ConfigError(
            "shard_blocks divides every block among several processes, but this job has only one.",
            code="unsupported_config",
            hint="Start it with torchrun --nproc-per-node N, or remove shard_blocks. For workers of the service, "
            "set BITFOUNDRY_ENGINE_RANKS.",
            field="/shard_blocks",
        )
    return ranks if shard_blocks else None


def shard(block: nn.Module, ranks: Ranks, device: torch.device, keeps: Callable[[str], bool]) -> None:
    """Divide the linear layers of ``block``, which is on the meta device, among ``ranks``: memory without values.

    ``keeps`` returns True for names of parameters that stay whole on every rank.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks.size,))
    for name, part in list(block.named_modules()):
        if isinstance(part, SplitExperts | OneByOne):
            part.runs_all = True
        if isinstance(part, SHARDED) and not keeps(f"{name}.weight"):
            # By default the outermost sharded module keeps its weights; here each layer is an outermost one.
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
            part.to_empty(device=device)


def check_all_finite(weights: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Raise NumericsError on all ranks if a weight holds NaN or infinity on any rank; keys are the layers' names."""
    bad = {name for name, weight in weights.items() if not is_finite(local_rows(weight))}
    if any(map(is_sharded, weights.values())):
        bad = bad.union(*ranks.gather(bad))
    for name, weight in weights.items():
        if name in bad:
            check_finite(whole(weight), name)
