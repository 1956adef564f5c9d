"""Text of another kind than the model is for is said, and only then."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from quantcore.config.texts import CalibrationConfig
from quantcore.engine.data.fit import warnings_of
from quantcore.engine.data.windows import TokenWindows
from tests.support.models import tiny_tokenizer

TEMPLATE = "{{ bos_token }}{% for one in messages %}<|{{ one.role }}|>\n{{ one.content }}<eos>\n{% endfor %}"
PROSE = "It rained all day, and nobody came; the letters lay on the table, unread."
CHAT = "<|user|>\nWhat is it?<eos>\n<|assistant|>\nIt is a lamp.<eos>\n"
PYTHON = "def area(r):\n    return 3 * r * r\n"
C = "int main(void)\n{\n  return 0;\n}\n"


@pytest.fixture
def tokenizer() -> Iterator[PreTrainedTokenizerFast]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def said(tokenizer: PreTrainedTokenizerFast, text: str, model: str = "org/small", **calibration: Any) -> list[str]:
    ids_NT = torch.tensor([tokenizer(text, verbose=False)["input_ids"]])
    return list(
        warnings_of(
            CalibrationConfig(**{"source": "a.txt", **calibration}), TokenWindows(ids_NT, ids_NT), tokenizer, model
        )
    )


def test_a_chat_model_without_chats(tokenizer: PreTrainedTokenizerFast) -> None:
    (warning,) = said(tokenizer, PROSE)
    assert "contains no chats ('<|user|>' never occurs)" in warning and "builtin:0.5" in warning
    assert said(tokenizer, CHAT) == [] and said(tokenizer, PROSE + CHAT) == []
    assert said(tokenizer, PROSE, source="builtin") == []
    mixed = ({"source": "a.txt"}, {"source": "builtin"})
    assert said(tokenizer, PROSE, source=None, sources=mixed) == []


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}", "{% for %}"])
def test_a_template_that_says_nothing_about_chats(tokenizer: PreTrainedTokenizerFast, template: str | None) -> None:
    tokenizer.chat_template = template
    assert said(tokenizer, PROSE) == []


def test_a_code_model_without_code(tokenizer: PreTrainedTokenizerFast) -> None:
    (warning,) = said(tokenizer, CHAT, "org/Some-Coder-7B")
    assert "contains no code" in warning
    for code in (PYTHON, C):
        assert said(tokenizer, CHAT + code, "org/Some-Coder-7B") == []
    assert said(tokenizer, CHAT, "org/sentence-encoder") == said(tokenizer, CHAT, "t5-decoder") == []
