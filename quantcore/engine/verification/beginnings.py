"""Checks that the windows of a job begin as a runtime begins a text: the tokenizer is asked as a runtime asks it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import PreTrainedTokenizerBase

from quantcore.engine.model.kinds import Kind
from quantcore.errors import ProofError


def check_beginnings(
    tokenizer: PreTrainedTokenizerBase, kind: Kind, windows_NT: torch.Tensor, calibration_first: Collection[int]
) -> None:
    """Raise ProofError unless all windows begin with the special token that begins a text, once, if there is one.

    ``calibration_first`` are the first tokens of the calibration windows. Encoders, and speech models, whose decoder
    gets its start token with each call, are left out.
    """
    first = tokenizer("a")["input_ids"][0]
    if kind not in (Kind.causal, Kind.sequence_to_sequence) or first not in tokenizer.all_special_ids:
        return
    begins = {*windows_NT[:, 0].tolist(), *calibration_first}
    if begins - {first} or (windows_NT[:, 1] == first).any():
        raise ProofError(
            f"The model's tokenizer begins a text with {tokenizer.decode([first])!r} once, but windows of this job "
            "begin differently: calibration and measurements do not match what a runtime computes.",
            code="proof_windows_begin_otherwise",
            hint="The artifact was withheld. Please report this as a bug.",
        )
