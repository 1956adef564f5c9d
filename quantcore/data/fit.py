"""Says where the calibration text does not fit the model that it is for."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from quantcore.config.texts import CalibrationConfig
from quantcore.data.chat import unread_arguments


def warnings_of(calibration: CalibrationConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a sentence or two about each thing that does not fit."""
    if unread := unread_arguments(tokenizer, calibration.chat_template_kwargs):
        yield (
            f"The model's chat template never reads {', '.join(unread)} (chat_template_kwargs): chats are the same"
            " without. Check the names in the template."
        )
