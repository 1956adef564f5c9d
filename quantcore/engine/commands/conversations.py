"""``bitfoundry conversations``: lets a chat model write conversations, to calibrate it on what it says itself.

The model gets the beginning of a user's turn in its own template and writes the question, then the answer: the method
of Magpie (Xu et al. 2024, arXiv:2406.08464). Text of this kind is nearest to what a chat model is used for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantcore.checkpoint.artifact import written_whole
from quantcore.data.builtin_text import Render
from quantcore.engine.data.chat_template import chat_renderer
from quantcore.engine.data.tokenizer import load_tokenizer, tokenize_with
from quantcore.engine.evaluation.answer_faults import is_thinking, repeats
from quantcore.engine.evaluation.generation import Prompt, continue_prompts, end_tokens, longest_input, without_end
from quantcore.engine.evaluation.inputs import find_model
from quantcore.engine.evaluation.model import EvaluatedModel, open_model
from quantcore.errors import CalibrationError
from quantcore.events import Emit, PhaseStarted, Progress
from quantcore.importing.model import Model, read_model

MARK = "bitfoundrywritesitsquestionhere"
"""Stands for a user's message while the place of one in the template is looked for."""
QUESTION_LEN, ANSWER_LEN = 96, 384
"""Most tokens of a question and of an answer. A longer answer ends with its last whole sentence, a question is dropped.
"""
MIN_WORDS = 3
AT_ONCE = 32
"""Number of conversations that are written together: their caches are in memory at once."""
MIN_SHARE = 1 / 8
"""A model of whose conversations fewer than this share can be used is given up."""
_SENTENCES = re.compile(r".*[.!?。！？\n]", re.DOTALL)
SAMPLING: Mapping[str, float] = {"temperature": 1.0, "top_p": 0.95}


@dataclass(frozen=True)
class Turn:
    """How a template writes a user's message: the tokens before it, and the token behind it, if it is a special one."""

    before: list[int]
    end: int | None


def conversations(
    model_name: str, file: Path, num_tokens: int, arguments: Mapping[str, Any], seed: int, emit: Emit
) -> dict[str, Any]:
    """Write conversations of at least ``num_tokens`` tokens in the model's template; ``file`` appears whole.

    ``arguments`` are those of the template. Returns the numbers of conversations and tokens, and of what was dropped by
    reason. Raises CalibrationError ``no_chat_template``, and ``no_conversations`` for a model that writes hardly any.
    """
    path = find_model(model_name, emit)
    described = read_model(path)
    emit(PhaseStarted("export"))
    writer = _Writer(described, path, arguments)
    kept: list[list[dict[str, str]]] = []
    dropped: Counter[str] = Counter()
    written = 0
    while written < num_tokens:
        for question, answer in writer.write(seed + len(kept) + dropped.total()):
            fault = _fault(question, answer, {messages[0]["content"] for messages in kept})
            if fault is not None:
                dropped[fault] += 1
                continue
            kept.append([{"role": "user", "content": str(question)}, {"role": "assistant", "content": str(answer)}])
            written += writer.num_tokens(kept[-1])
        emit(Progress("export", min(written, num_tokens), num_tokens, "token", None))
        if len(kept) < MIN_SHARE * (len(kept) + dropped.total()):
            raise CalibrationError(
                f"Of {len(kept) + dropped.total()} conversations that the model wrote, {len(kept)} can be used"
                f" ({_listed(dropped)}).",
                code="no_conversations",
                hint="Calibrate it on chats of another source, or on the built-in text.",
            )
    with written_whole(file) as scratch:
        rows = (json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in kept)
        Path(scratch).write_text("".join(rows), "utf-8")
    return {"num_conversations": len(kept), "num_tokens": written, "dropped": dict(dropped), "file": str(file)}


class _Writer:
    """Writes questions, and answers to them, ``AT_ONCE`` at a time."""

    def __init__(self, described: Model, path: Path, arguments: Mapping[str, Any]) -> None:
        self._tokenizer = load_tokenizer(path)
        self._tokenize = tokenize_with(self._tokenizer)
        self._render = chat_renderer(self._tokenizer, arguments)
        self._ask = chat_renderer(self._tokenizer, {**arguments, "add_generation_prompt": True})
        self._turn = find_turn(self._render, self._tokenizer)
        self._ends = end_tokens(described, self._tokenizer)
        self._model: EvaluatedModel = open_model(described)
        longest = longest_input(self._model.streamed.model.config)
        room = (longest or QUESTION_LEN + ANSWER_LEN + len(self._turn.before)) - len(self._turn.before)
        self._question_len = min(QUESTION_LEN, room // 4)
        self._answer_len = min(ANSWER_LEN, room // 2)

    def write(self, seed: int) -> list[tuple[str | None, str | None]]:
        """Return questions and answers; None for one that did not come to its end."""
        ends = sorted(self._ends | ({self._turn.end} if self._turn.end is not None else set()))
        begun = [Prompt(self._turn.before, "")] * AT_ONCE
        questions = self._texts(self._drawn(begun, ends, self._question_len, seed), ends)
        asked = [place for place, question in enumerate(questions) if question is not None]
        prompts = [
            Prompt(self._tokenize(self._ask([{"role": "user", "content": questions[place]}])), "") for place in asked
        ]
        answers: dict[int, str | None] = {}
        if prompts:
            found = self._drawn(prompts, sorted(self._ends), self._answer_len, seed)
            answers = dict(zip(asked, self._texts(found, sorted(self._ends), may_be_cut=True), strict=True))
        return [(question, answers.get(place)) for place, question in enumerate(questions)]

    def num_tokens(self, messages: list[dict[str, str]]) -> int:
        return len(self._tokenize(self._render(list(messages))))

    def _drawn(self, prompts: Sequence[Prompt], ends: Sequence[int], length: int, seed: int) -> list[list[int]]:
        return continue_prompts(self._model, prompts, ends, length, SAMPLING, seed, batch=AT_ONCE)

    def _texts(self, rows: Sequence[list[int]], ends: Sequence[int], *, may_be_cut: bool = False) -> list[str | None]:
        texts: list[str | None] = []
        for row in rows:
            text = str(self._tokenizer.decode(without_end(row, ends), skip_special_tokens=True)).strip()
            if row[-1] not in ends:
                sentences = _SENTENCES.match(text) if may_be_cut else None
                texts.append(sentences and sentences[0])
            else:
                texts.append(text)
        return texts


def find_turn(render: Render, tokenizer: PreTrainedTokenizerBase) -> Turn:
    """Return how the template writes a user's message. Raises CalibrationError if there is none, or not shown by it."""
    if not tokenizer.chat_template:
        raise CalibrationError(
            "The model's tokenizer has no chat template, so there is no place for it to write a question.",
            code="no_chat_template",
            hint="Only chat models write conversations. Calibrate others on a text.",
        )
    before, mark, behind = render([{"role": "user", "content": MARK}]).partition(MARK)
    if not mark:
        raise CalibrationError(
            "The model's chat template does not write what a user says.",
            code="bad_chat_template",
            hint="Calibrate the model on chats of another source, or on the built-in text.",
        )
    tokenize = tokenize_with(tokenizer)
    next_ids = tokenizer.encode(behind.lstrip(), add_special_tokens=False)[:1]
    special = [number for number in next_ids if number in tokenizer.all_special_ids]
    return Turn(tokenize(before), special[0] if special else None)


def _fault(question: str | None, answer: str | None, asked: set[str]) -> str | None:
    """Return why a conversation is of no use; None for a good one. ``asked`` are the questions that there are."""
    if question is None or answer is None:
        return "without an end"
    if len(question.split()) < MIN_WORDS or not answer:
        return "empty"
    if question in asked:
        return "asked twice"
    if repeats(answer) or repeats(question):
        return "in a loop"
    return "thinking without an end" if is_thinking(answer) else None


def _listed(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {fault}" for fault, count in sorted(dropped.items(), key=lambda each: -each[1]))
