"""Checks that the scales of the KV cache fit its input, on text not used for calibration."""

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
            f"The scales of the KV cache do not fit its input: of {worst[0]} they cut off {worst[1]:.0%} of the "
            f"norm on the evaluation's text; the limit is {MAX_CUT_OFF:.0%}.",
            code="proof_cache_cut_off",
            hint="Calibrate with text like the evaluation's, or do not quantize the KV cache (--kv_cache_dtype). "
            "The artifact was withheld. If the texts are similar, please report this as a bug.",
        )
