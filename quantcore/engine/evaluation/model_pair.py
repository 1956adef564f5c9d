"""A quantized model and its original, measured on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.divergence import Measured, measure
from quantcore.engine.evaluation.inputs import block_progress, states_of_original
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.events import Emit


@dataclass(frozen=True)
class ModelPair:
    """A ``quantized`` model and its ``original``, whose measurements are cached in ``baselines``."""

    original: EvaluatedModel
    quantized: EvaluatedModel
    baselines: BaselineCache

    def states(self, text: EvaluationText, emit: Emit) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run both models block by block; return the last hidden states [1, T, H], first those of the original."""
        before = states_of_original(self.original, self.baselines, text, emit)
        return before, self.quantized.last_states(text, block_progress(emit, self.quantized))

    def measure(
        self, text: EvaluationText, states: Sequence[torch.Tensor], original_states: Sequence[torch.Tensor]
    ) -> Measured:
        """Measure losses and distances of predictions from their last hidden states [1, T, H]."""
        with (
            self.quantized.vocabulary(states[0]) as vocabulary,
            self.original.vocabulary(original_states[0]) as original_vocabulary,
        ):
            return measure(vocabulary, states, text, (original_vocabulary, original_states))
