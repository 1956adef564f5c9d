"""Checks that the scales of the KV cache fit what enters it, on text that calibration has not seen."""

from __future__ import annotations

from quantcore.engine.evaluation.clipping import Clipping
from quantcore.errors import ProofError

MAX_CUT_OFF = 0.2
"""Largest norm of what ranges may cut off keys or values, over the norm of all. Scales of what enters the cache cut off
less than 0.01 (Gemma 3 270M, SmolLM2), those of the outputs of Gemma's k_proj up to 0.7."""


def check_caches(clipping: Clipping) -> None:
    """Raise ProofError if ranges cut off much of the keys or values of a layer: they are those of other tensors."""
    worst = clipping.worst_cache()
    if worst is not None and not worst[1] <= MAX_CUT_OFF:
        raise ProofError(
            f"The scales of the KV cache do not fit what enters it: of {worst[0]} they cut off {worst[1]:.0%} of the"
            f" norm on the evaluation's text, and {MAX_CUT_OFF:.0%} is allowed.",
            code="proof_cache_cut_off",
            hint="Calibrate with text like the evaluation's, or leave the KV cache out (--kv_cache_dtype). If the texts"
            " are alike, please report this: the artifact is not handed out.",
        )
