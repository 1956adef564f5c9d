"""Lets a chat model and its original really answer prompts, each as its own files say, and compares the answers.

Scores of tokens are those of given texts. They do not show an answer that never ends, because a stop token is missing,
nor what another chat template does. So each model gets prompts in its own template here, and stops where its own files
say, greedily and as its own settings sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantcore.checkpoint.folder import find_gguf
from quantcore.checkpoint.headers import read_json
from quantcore.data.prompts import ChatPrompt, PromptSet
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation.answer_faults import THINKING, Answered, Asked
from quantcore.engine.evaluation.behaviour_change import AnsweredPrompt, compare_answers
from quantcore.engine.evaluation.generation import continue_prompts, end_tokens, longest_input, numbers, without_end
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.engine.evaluation.own_answers import Question, find_questions
from quantcore.engine.runtime.devices import release_freed_memory
from quantcore.errors import ConfigError
from quantcore.events import Emit, Progress
from quantcore.importing.model import read_model
from quantcore.report.behaviour import Behaviour

SEEDS = (0, 1)
"""Seeds of the answers that are sampled, beside the greedy one."""
SAMPLING: Mapping[str, type[int] | type[float]] = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "typical_p": float, "repetition_penalty": float,
}  # fmt: skip
"""Settings of generation_config.json that decide how answers are drawn, and what Transformers takes for them."""
GGUF_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|return|>", "<|call|>", "<EOT>", "</s>",
)  # fmt: skip
"""Tokens at which llama.cpp ends an answer by their names, whatever a GGUF file says (llama-vocab.cpp)."""


@dataclass(frozen=True)
class _Side:
    """One of the two models, with all that its folder says about its answers.

    ``questions`` has the prompt for each thing that is asked, None for one that its template does not take. ``ends``
    are the tokens that end its answers, with their names; ``sampling`` is None for a model that answers greedily.
    """

    model: EvaluatedModel
    folder: Path
    questions: Sequence[Question | None]
    ends: Mapping[int, str]
    sampling: Mapping[str, float] | None

    def answers(self, asked: Sequence[int], max_tokens: int, seed: int | None) -> list[list[int]]:
        """Return the tokens of the answers to some questions, by their places; greedy ones without a ``seed``."""
        prompts = [question.prompt for place in asked if (question := self.questions[place]) is not None]
        sampling = None if seed is None else self.sampling
        return continue_prompts(self.model, prompts, sorted(self.ends), max_tokens, sampling, seed or 0)

    def settings(self, asked: Sequence[int], max_tokens: int, seed: int | None) -> dict[str, Any]:
        """Return what decides ``answers``, for the cache."""
        prompts = [question.prompt.ids for place in asked if (question := self.questions[place]) is not None]
        found = {"prompts": prompts, "new_tokens": max_tokens, "ends": sorted(self.ends)}
        return found if seed is None else {**found, "sampling": dict(self.sampling or {}), "seed": seed}

    def read(self, answers: Sequence[Sequence[list[int]]]) -> list[list[Answered]]:
        """Return the answers of each kind, greedy or by a seed, as texts."""
        tokenizer = load_tokenizer(self.folder)
        return [
            [
                Answered(str(tokenizer.decode(without_end(ids, list(self.ends)))), len(ids), ids[-1] in self.ends)
                for ids in each
            ]
            for each in answers
        ]


def compare_behaviour(
    folders: tuple[Path, Path],
    arguments: Mapping[str, Any],
    prompts: PromptSet,
    max_tokens: int,
    pair: ModelPair,
    emit: Emit,
) -> Behaviour:
    """Let both models answer ``prompts``, with at most ``max_tokens`` each, and compare the answers.

    ``folders`` are those of the original and of the result: each model is asked in its own template, which gets
    ``arguments``. All ranks that share the models call it. Raises ConfigError ``no_behaviour`` for an original whose
    template takes none of the prompts.
    """
    longest = longest_input(pair.original.streamed.model.config)
    first, left_out = _side(pair.original, folders[0], arguments, prompts.prompts, longest, max_tokens)
    taken = [question.asked for question in first.questions if question is not None]
    if not taken:
        why = next(iter(left_out.values()), "its tokenizer has no chat template")
        raise ConfigError(
            f"The original cannot be asked any of the {len(prompts.prompts)} prompts: {why}",
            code="no_behaviour",
            hint="Behaviour is that of chat models. Leave it out, or use other prompts.",
        )
    first = _with_questions(first, taken)
    second, _ = _side(pair.quantized, folders[1], arguments, taken, longest, max_tokens)
    second = _with_questions(second, taken)
    release_freed_memory()
    asked = [place for place in range(len(taken)) if second.questions[place] is not None]
    answers = _ask((first, second), asked, max_tokens, pair, emit)
    release_freed_memory()
    texts = [side.read(each) for side, each in zip((first, second), answers, strict=True)]
    answered = [
        AnsweredPrompt(_asked(first, place), *([each[number] for each in side] for side in texts))
        for number, place in enumerate(asked)
    ]
    used = {first.ends[ids[-1]] for each in answers[0] for ids in each if ids[-1] in first.ends}
    found = Behaviour(
        num_prompts=len(taken),
        num_answers=(len(answers[0]), len(answers[1])),
        max_tokens=max_tokens,
        lost_ends=tuple(sorted(used - set(second.ends.values()))),
        num_rendered_otherwise=sum(map(_differ, first.questions, second.questions)),
        left_out=left_out,
        **compare_answers(answered),
    )
    return found if prompts.sha256 is None else found.replace(prompts_sha256=prompts.sha256)


def _ask(
    sides: tuple[_Side, _Side], asked: Sequence[int], max_tokens: int, pair: ModelPair, emit: Emit
) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Return the tokens of the answers of both models: all greedy ones, then those by each of SEEDS."""
    original, result = sides
    answers: tuple[list[list[list[int]]], list[list[list[int]]]] = [], []
    for seed in (None, *SEEDS) if asked else ():
        unit = "answers of model" if seed is None else "sampled answers of model"
        if seed is None or original.sampling is not None:
            emit(Progress("verify", 1, 2, unit))
            answer = partial(original.answers, asked, max_tokens, seed)
            answers[0].append(pair.baselines.value(original.settings(asked, max_tokens, seed), answer))
        if seed is None or result.sampling is not None:
            emit(Progress("verify", 2, 2, unit))
            answers[1].append(result.answers(asked, max_tokens, seed))
    return answers


def _side(
    model: EvaluatedModel, folder: Path, arguments: Mapping[str, Any], prompts: Sequence[ChatPrompt],
    longest: int | None, max_tokens: int,
) -> tuple[_Side, dict[str, str]]:  # fmt: skip
    """Return a model with the questions that its template takes, and the kinds of prompts left out, with reasons."""
    tokenizer = load_tokenizer(folder)
    questions, left_out = find_questions(tokenizer, arguments, prompts, longest, max_tokens)
    ends, sampling = served(folder, tokenizer)
    names = {end: str(tokenizer.convert_ids_to_tokens(end)) for end in ends}
    return _Side(model, folder, questions, names, sampling), left_out


def _with_questions(side: _Side, asked: Sequence[ChatPrompt]) -> _Side:
    """Return ``side`` with one question for each thing ``asked``, None where it has none."""
    found = {id(question.asked): question for question in side.questions if question is not None}
    return _Side(side.model, side.folder, [found.get(id(each)) for each in asked], side.ends, side.sampling)


def served(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[frozenset[int], dict[str, float] | None]:
    """Return the tokens that end an answer of the model in a folder, and its sampling settings, as it is served.

    They are those that ``generate`` of Transformers takes: of generation_config.json, and without this file the tokens
    of config.json. A GGUF file is served by llama.cpp, which knows more tokens by name. The settings are None for a
    model that does not sample.
    """
    if find_gguf(folder) is not None:
        model = read_model(folder)
        known = tokenizer.get_vocab()
        named = frozenset(known[name] for name in GGUF_ENDS if name in known)
        return end_tokens(model, tokenizer) | named, None
    path = folder / "generation_config.json"
    if not path.is_file():
        config = read_json(folder / "config.json", "no_config")
        text_config = config.get("text_config")
        inner = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
        return numbers(config.get("eos_token_id", inner)), None
    generation = read_json(path, "no_generation_config")
    sampling = {
        name: kind(value)
        for name, kind in SAMPLING.items()
        if isinstance(value := generation.get(name), int | float) and not isinstance(value, bool)
    }
    samples = generation.get("do_sample") is True and sampling.get("temperature", 1.0) > 0
    return numbers(generation.get("eos_token_id")), sampling if samples else None


def _asked(side: _Side, place: int) -> Asked:
    question = side.questions[place]
    assert question is not None
    asked = question.asked
    text = "\n".join(str(message["content"]) for message in asked.messages if message.get("role") != "system")
    thinks = question.ending.endswith(tuple(begin for begin, _ in THINKING))
    return Asked(asked.kind, text, asked.tool_names, asked.schema, asked.answer, thinks)


def _differ(first: Question | None, second: Question | None) -> bool:
    return first is None or second is None or first.prompt.ids != second.prompt.ids
