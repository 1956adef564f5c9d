"""Measures how many of the tokens that a draft head proposes are those that the model itself would choose.

Speculative decoding drafts the token after next from the model's last hidden state and the next token, and keeps it if
the model agrees (Leviathan et al. 2023, arXiv 2211.17192; Gloeckle et al. 2024, arXiv 2404.19737). Here both choose
greedily, at every position of the held-out text. Only the first draft layer is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_layers import MtpModel

from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.evaluation.perplexity import mean_and_stderr
from quantcore.engine.runtime.block_capture import NonBlockParts, model_code
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.errors import ModelError
from quantcore.events import Emit, Warned
from quantcore.report.quality import DraftQuality, Measure


@dataclass(frozen=True)
class Drafting:
    """A model with draft layers, and the last hidden states [1, T, H] of the windows."""

    model: EvaluatedModel
    states: Sequence[torch.Tensor]

    def acceptance(self, ids_NT: torch.Tensor) -> Measure:
        """Return the share of drafted tokens that the model chooses as well.

        A draft for position t + 2 needs the state at t and the token at t + 1: a window of T tokens has T - 1 drafts.
        """
        device = self.model.streamed.device
        with (
            torch.inference_mode(),
            self.model.head() as head,
            self.model.draft() as draft,
            model_code("its draft"),
            matmul_precision(device),
        ):
            pairs = zip(ids_NT.to(device), self.states, strict=True)
            accepted_NP = torch.stack([_accepted(head, draft, ids_T[None], state) for ids_T, state in pairs])
        mean, stderr = mean_and_stderr(accepted_NP.double(), torch.ones_like(accepted_NP))
        return Measure(value=mean, stderr=stderr)


def measure_drafts(
    quantized: Drafting, original: Drafting | None, ids_NT: torch.Tensor, emit: Emit
) -> DraftQuality | None:
    """Measure one model or both on the same windows.

    Returns None if the checkpoint has no draft layers, and with a warning if Transformers has no code for them.
    """
    if not quantized.model.streamed.draft_names:
        return None
    try:
        before = None if original is None else original.acceptance(ids_NT)
        after = quantized.acceptance(ids_NT)
    except ModelError as error:
        emit(Warned("drafts_not_measured", f"The share of accepted draft tokens is not measured. {error.message}"))
        return None
    return DraftQuality(before=before, after=after, num_layers=len(quantized.model.draft_layers))


def _accepted(head: NonBlockParts, draft: MtpModel, ids_1T: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return for each position of a window whether the model would keep the drafted token, [T - 1]."""
    found: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, outputs: Any) -> None:
        found.append(outputs.last_hidden_state)

    hook = head.model.get_decoder().register_forward_hook(keep)  # type: ignore[no-untyped-call]
    try:
        own_1T = head(state).argmax(-1)
    finally:
        hook.remove()
    positions_1P = torch.arange(1, ids_1T.shape[1], device=head.device)[None]
    drafted = draft.forward_layer(0, found[0][:, :-1], positions_1P, None, input_ids=ids_1T[:, 1:])
    drafted_1P = draft._project_to_logits(drafted).argmax(-1)
    return (drafted_1P == own_1T[:, 1:])[0].cpu()
