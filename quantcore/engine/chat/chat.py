"""A chat with a model, alone or beside its original: they answer the same prompts, token by token, greedily."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from quantcore.engine.chat.streaming import stream_tokens
from quantcore.engine.data.tokenizer import load_tokenizer, tokenize_with
from quantcore.engine.evaluation.generation import Message, end_tokens, in_template, longest_input
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.model.kinds import Kind
from quantcore.engine.model.skeleton import kind_of
from quantcore.errors import CalibrationError, ConfigError, ModelError
from quantcore.importing.model import Model, read_model
from quantcore.report.answers import MAX_NEW_TOKENS, Answer, Turn, common_length, first_difference


class Chat:
    """A conversation with models in memory, each of which sees its own earlier answers: the original, and its result.

    One model answers alone.

    A tokenizer without a chat template has no conversation: the models continue each prompt by itself.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        models: tuple[PreTrainedModel, PreTrainedModel] | tuple[PreTrainedModel],
        end_tokens: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._models = models
        self._end_tokens = end_tokens
        self._max_new_tokens = max_new_tokens
        self._messages: list[list[Message]] = [[] for _ in models]

    @property
    def has_template(self) -> bool:
        """True if prompts are rendered with the chat template."""
        return bool(self._tokenizer.chat_template)

    def reset(self) -> None:
        """Forget the conversation."""
        for messages in self._messages:
            messages.clear()

    def say(self, prompt: str) -> Generator[Turn]:
        """Yield the turn as it grows, by a token of each answer at a time; the last one is whole.

        A turn that is not read to its end is forgotten. Raises ModelError ``bad_chat_template`` and ``bad_tokenizer``,
        and ConfigError ``empty_prompt``, or ``chat_too_long`` if the models read no more tokens.
        """
        asked = [[*messages, {"role": "user", "content": prompt}] for messages in self._messages]
        answering = [
            _Answering(self._stream(model, messages), self._end_tokens)
            for model, messages in zip(self._models, asked, strict=True)
        ]
        with ExitStack() as stack:
            for each in answering:
                stack.callback(each.close)
            num_growing = len(answering)
            while num_growing:
                num_growing = sum(each.advance() for each in answering)
                yield self._turn(prompt, answering, is_whole=not num_growing)
        for own, messages, each in zip(self._messages, asked, answering, strict=True):
            own[:] = [*messages, {"role": "assistant", "content": self._text(each.ids)}]

    def _stream(self, model: PreTrainedModel, messages: list[Message]) -> Generator[int]:
        ids = self._encode(messages)
        if not ids:
            raise ConfigError("The prompt has no tokens.", code="empty_prompt", hint="Enter some text.")
        longest = longest_input(model.config)
        room = self._max_new_tokens if longest is None else min(self._max_new_tokens, longest - len(ids))
        if room < 1:
            raise ConfigError(
                f"The conversation has {len(ids)} tokens, but the model's limit is {longest}, including the answer.",
                code="chat_too_long",
                hint="Start over, or use a shorter prompt.",
            )
        ends = sorted(self._end_tokens)
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=room, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
        )
        return stream_tokens(model, ids, settings)

    def _encode(self, messages: list[Message]) -> list[int]:
        if not self.has_template:
            return tokenize_with(self._tokenizer, with_special_tokens=True)(messages[-1]["content"])
        try:
            return in_template(self._tokenizer, {}, messages)
        except CalibrationError as error:
            raise ModelError(
                error.message, code=error.code, hint="The error is in the model's own template."
            ) from error

    def _turn(self, prompt: str, answering: list[_Answering], *, is_whole: bool) -> Turn:
        *original, quantized = (
            Answer(text=self._text(each.ids), num_tokens=len(each.ids), time_s=round(each.time_s, 3))
            for each in answering
        )
        first, last = answering[0].ids, answering[-1].ids
        index = first_difference(first, last, are_whole=is_whole)
        return Turn(
            prompt=prompt,
            original=original[0] if original else None,
            quantized=quantized,
            first_difference=index,
            first_different_char=None if index is None else common_length(quantized.text, self._text(last[:index])),
        )

    def _text(self, ids: list[int]) -> str:
        """Return the text of tokens, without an incomplete character at its end."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")


class _Answering:
    """An answer that is being generated: its tokens ``ids`` so far, and the time that they took."""

    def __init__(self, tokens: Generator[int], end_tokens: frozenset[int]) -> None:
        self._tokens = tokens
        self._end_tokens = end_tokens
        self.ids: list[int] = []
        self.time_s = 0.0

    def advance(self) -> bool:
        """Add a token; return False if the answer is whole."""
        start = time.monotonic()
        token = next(self._tokens, None)
        self.time_s += time.monotonic() - start
        if token is None or token in self._end_tokens:
            self.close()
            return False
        self.ids.append(token)
        return True

    def close(self) -> None:
        self._tokens.close()


@contextmanager
def open_chat_alone(folder: Path, max_new_tokens: int = MAX_NEW_TOKENS) -> Iterator[Chat]:
    """Hold one model in memory while this lasts. Raises as ``open_chat``."""
    model = _read(folder)
    tokenizer = load_tokenizer(folder)
    with open_model(model).whole() as alone:
        yield Chat(tokenizer, (alone,), end_tokens(model, tokenizer), max_new_tokens)


@contextmanager
def open_chat(
    folder: Path, original_folder: Path, max_new_tokens: int = MAX_NEW_TOKENS, adapter: Path | None = None
) -> Iterator[Chat]:
    """Hold both models in memory while this lasts, with weights in the dtype in which they compute.

    An ``adapter`` is merged into the original. Raises ModelError: ``cannot_generate`` for a model that is not a causal
    language model, ``other_vocabulary`` if the two have different tokens, else as ``read_model`` and ``open_model``.
    """
    original, quantized = _read(original_folder, adapter), _read(folder)
    tokenizer = load_tokenizer(folder)
    _check_same_tokens(load_tokenizer(original_folder), tokenizer)
    ends = end_tokens(original, tokenizer) | end_tokens(quantized, tokenizer)
    with open_model(original).whole() as first, open_model(quantized).whole() as second:
        yield Chat(tokenizer, (first, second), ends, max_new_tokens)


def _read(path: Path, adapter: Path | None = None) -> Model:
    model = read_model(path, adapter)
    kind = kind_of(model.headers.config)
    if kind is not Kind.causal:
        raise ModelError(
            f"The model in {path} ({model.headers.config['model_type']}, {kind.replace('_', ' ')}) does not generate"
            " text from a prompt.",
            code="cannot_generate",
            hint="Only causal language models can chat. `bitfoundry evaluate` measures the other models.",
        )
    return model


def _check_same_tokens(original: PreTrainedTokenizerBase, quantized: PreTrainedTokenizerBase) -> None:
    """Raise ModelError unless the quantized model has all tokens of the original, under the same numbers."""
    known = quantized.get_vocab()
    others = [token for token, number in original.get_vocab().items() if known.get(token) != number]
    if others:
        raise ModelError(
            f"The two models have different vocabularies: {len(others)} tokens of the original have another id in "
            f"the quantized model or are missing, such as {others[0]!r}.",
            code="other_vocabulary",
            hint="Provide the model that the quantized one was made from.",
        )
