"""Says where the calibration text does not fit the model that it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from quantcore.config.texts import BUILTIN, CalibrationConfig
from quantcore.engine.data.chat_template import chat_renderer, unread_arguments
from quantcore.engine.data.windows import TokenWindows
from quantcore.errors import CalibrationError

CODE_MODEL = re.compile(r"(?<!en)(?<!de)coder|codestral|code-?llama|codegen|codegemma", re.IGNORECASE)
CODE = re.compile(
    r"^\s*(?:def \w+\(|class \w+[:({]|import \w|from [\w.]+ import |#include|function \w+\(|fn \w+|func \w+"
    r"|(?:public|private|static|export) \w|(?:const|let|var) \w+ ?=)|[;{}]\s*$",
    re.MULTILINE,
)
"""Beginnings and ends of lines that code has in one language or another, and hardly any other text."""
QUESTION = "question"


def warnings_of(
    calibration: CalibrationConfig, windows: TokenWindows, tokenizer: PreTrainedTokenizerBase, model: str
) -> Iterator[str]:
    """Yield a sentence or two about each thing that does not fit; ``model`` is its name.

    The kind of the text is judged only if it is of the user's choice.
    """
    if windows.left_out:
        yield windows.left_out
    if unread := unread_arguments(tokenizer, calibration.chat_template_kwargs):
        yield (
            f"The model's chat template never reads {', '.join(unread)} (chat_template_kwargs), so they have no "
            "effect. Check the names in the template."
        )
    if any(part.source == BUILTIN for part in calibration.parts):
        return
    texts = [str(tokenizer.decode(ids)) for ids in windows.calibration_NT.tolist()]
    mark = _before_a_question(calibration, tokenizer)
    if not any(mark in text for text in texts):  # no text is without an unknown mark, ""
        yield (
            f"The model has a chat template, but the calibration text contains no chats ('{mark[:40]}' never "
            "occurs). Specify a column of messages, or add a source with chats: SOURCE:0.5,builtin:0.5."
        )
    if CODE_MODEL.search(model) and not any(CODE.search(text) for text in texts):
        yield (
            "The model's name suggests a code model, but the calibration text contains no code. Add a source with "
            "code: SOURCE:0.5,builtin:0.5."
        )


def _before_a_question(calibration: CalibrationConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the line, or its beginning, that the template puts before each question; "" if that is not known."""
    try:
        rendered = chat_renderer(tokenizer, calibration.chat_template_kwargs)([{"role": "user", "content": QUESTION}])
    except CalibrationError:
        return ""
    before = rendered.partition(QUESTION)[0].removeprefix(str(tokenizer.bos_token)).strip()
    return before.rpartition("\n")[2]
