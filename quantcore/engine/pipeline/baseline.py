"""The float model's hidden states after the last block, with which the proof compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantcore.engine.blockwise.savepoint import SavePoint
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.ranks import Ranks
from quantcore.importing.model import Model


@dataclass(frozen=True)
class Baseline:
    """The float model's last hidden states: from the cache, or from a stream of the job, which then fills the cache.

    If ``is_measured`` is False, nothing is compared and there are no states.
    """

    original: Model
    text: EvaluationText
    cache: BaselineCache
    ranks: Ranks
    is_measured: bool

    def needs_stream(self, savepoint: SavePoint, saved: Mapping[str, Any] | None) -> bool:
        """Return True if the job has to take the evaluation windows through the float blocks. All ranks call it."""
        if not self.is_measured:
            return False
        if saved:
            return savepoint.holds(saved, "held_out")
        return not self.ranks.share(self.cache.has_states(self.text.identity))

    def last_states_NTH(self, held_out: Hidden | None) -> torch.Tensor | None:
        """Return the states after the last block, on the first rank at least. All ranks call it.

        ``held_out`` has come through all blocks. A cache entry that has been removed since the job began is computed
        again.
        """
        if held_out is not None:
            states_NTH = torch.cat([state.cpu() for part in self.ranks.gather(list(held_out.states)) for state in part])
            if self.ranks.is_first:
                self.cache.write_states(self.text.identity, states_NTH)
            return states_NTH
        if not (self.is_measured and self.ranks.is_first):
            return None
        return self.cache.states(
            self.text.identity, lambda: open_model(self.original).last_states_NTH(self.text, lambda done: None)
        )
