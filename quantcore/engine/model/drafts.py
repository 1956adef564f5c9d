"""The layers for multi-token prediction (MTP) of a model, as Transformers builds them for speculative decoding.

A checkpoint stores them behind its blocks (``model.layers.61`` of DeepSeek-V3) or as ``mtp.*``; the model itself runs
without them. ``transformers.modeling_layers.MtpModel`` holds one decoder layer of the model's own class for each, and
shares the embedding and the output projection with the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from quantcore.engine.model.empty import build_empty
from quantcore.engine.model.parameter_names import place_tensors
from quantcore.errors import ModelError, reason_of

FIRST = "layers.0."
"""Start of the names in the first draft layer."""
_HINT = "Their weights are still written; only the share of accepted tokens is not measured."


@dataclass(frozen=True)
class Draft:
    """Draft layers, and the parameter that each stored tensor of them fills. ``layer`` is the first one, measured."""

    model: MtpModel
    placed: Mapping[str, str]

    @property
    def layer(self) -> nn.Module:
        return self.model.layers[0]

    def find_module(self, name: str) -> nn.Module | None:
        """Return the module of the layer with the checkpoint's ``name``; None if it is not in the first draft layer."""
        path = self.placed.get(f"{name}.weight", "").rpartition(".")[0]
        return self.model.get_submodule(path) if path.startswith(FIRST) else None


def build_draft(model: PreTrainedModel, stored: Iterable[str]) -> Draft:
    """Return the draft layers of ``model``, whose parameters use no memory; ``stored`` are their tensors.

    Raises ModelError ``no_draft_code`` if Transformers has no code for them.
    """
    num_layers = getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None)
    if not num_layers:
        raise ModelError(
            f"Transformers {transformers.__version__} has no code for the draft layers of this"
            f" '{model.config.model_type}' model.",
            code="no_draft_code",
            hint=_HINT,
        )
    try:
        draft = build_empty(lambda: MtpModel(model, num_layers))
        placed = place_tensors(draft, stored, draft.get_weight_conversions(model))
    except Exception as error:  # the model's own code runs, which need not know of draft layers
        raise ModelError(
            f"Transformers cannot build the draft layers of this '{model.config.model_type}' model: {reason_of(error)}",
            code="no_draft_code",
            hint=_HINT,
        ) from error
    draft.train(False).requires_grad_(False)
    return Draft(draft, placed)
