"""Recognizes layers that are kept in high precision by default for their role in the model, by names and shapes.

They are small, and their errors weigh more than their bytes: producers of quantized checkpoints keep them, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from quantcore.checkpoint.blocks import Blocks, is_of_tower
from quantcore.checkpoint.experts import find_moes, find_routers

ROUTER = "router"
GATE = "recurrence gate"
INDEXER = "head weights of the attention indexer"
LATENT = "latent projection of the experts"
SHARED = "stacked shared experts"
DRAFT = "only for multi-token prediction"
TOWER = "part outside the language model"
TINY = "layer with very few inputs or outputs"
MIN_SIDE, MIN_WIDTH = 8, 64  # a layer with fewer inputs or outputs is tiny, in a model of at least this width

DRAFT_PART = re.compile(r"(?:^|\.)((?:mtp|eagle)\w*)\.")
"""Pattern of the names inside a draft head; its group is the head's own name."""

_DRAFT_JOINT = re.compile(r"\.(eh_proj|fc|input_proj|shared_head(\.\w+)?|\w*head|embed_tokens)$")
_INDEXER = re.compile(r"indexer(\.\w+)*\.weights_proj$")
_LATENT = re.compile(r"\.\w*latent_proj$")
_PROJECTOR = re.compile(
    r"projector|projection|merger|connector|aligner|resampler|adapt|multi_modal|embed_(vision|audio)"
)
_ENCODER = re.compile(r"(^|\.)encoder\.")  # of a model that hears: one that reads text has blocks
_SCORES = re.compile(r"(^|\.)(score|classifi\w*|qa_outputs|pooler)(\.|$)")


def find_roles(shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the modules that are kept unless the config's ``include`` names them, each with its role.

    ``shapes`` has the shape of every tensor by name; parameters of one axis (``A_log``) tell what is a recurrence.
    """
    moes, heads = find_moes(shapes), find_recurrences(shapes)
    is_wide = max((min(shape) for shape in shapes.values() if len(shape) == 2), default=0) >= MIN_WIDTH
    roles = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == name:
            continue
        owner = module.rpartition(".")[0]
        if owner in heads and shape[0] in (heads[owner], 2 * heads[owner]):
            roles[module] = GATE
        elif _INDEXER.search(module):
            roles[module] = INDEXER
        elif owner in moes and _LATENT.search(module):
            roles[module] = LATENT
        elif is_wide and min(shape) < MIN_SIDE:  # Gemma 3n mixes its four copies of the states by such layers
            roles[module] = TINY
    return roles | dict.fromkeys(find_routers(shapes), ROUTER)


def tensors_of_drafts(stored: Iterable[str], blocks: Blocks) -> list[str]:
    """Return those of the ``stored`` tensors that belong to draft heads: behind the blocks, or called mtp or eagle."""
    return [
        name
        for name in stored
        if DRAFT_PART.search(name) or ((block := blocks.number_of(name)) is not None and block >= len(blocks))
    ]


def is_inside_draft(module: str) -> bool:
    """Return True for a layer in the block of a draft head; False for one that joins its inputs, and for its head."""
    return _DRAFT_JOINT.search(module) is None


def role_outside_blocks(module: str) -> str:
    """Describe a linear layer that is in no block of the language model, by its name."""
    if DRAFT_PART.search(module):
        return DRAFT
    if _PROJECTOR.search(module):
        return "projector between parts of the model"
    if is_of_tower(f"{module}.weight") or _ENCODER.search(module):
        return TOWER
    return "score head" if _SCORES.search(module) else "outside the blocks"


def find_recurrences(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the number of heads of each module that decays a state with one number a head (``A_log``).

    Gated DeltaNet, Kimi Delta Attention, Mamba 2. The state of Mamba decays by matrices: its module is not returned.
    """
    return {
        name.removesuffix(".A_log"): prod(shape)
        for name, shape in shapes.items()
        if name.endswith(".A_log") and sum(side > 1 for side in shape) == 1
    }
