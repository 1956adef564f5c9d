"""``bitfoundry evaluate``: measures an existing model, whoever quantized it, alone or beside its original."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantcore.config.cache_dtypes import CacheDtype
from quantcore.config.task import EvaluationConfig
from quantcore.data.prompts import read_prompt_set
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation import harness
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.behaviour import compare_behaviour
from quantcore.engine.evaluation.cache_dtypes import measure_cache_dtypes
from quantcore.engine.evaluation.divergence import measure, summarize, summarize_both
from quantcore.engine.evaluation.drafts import Drafting, measure_drafts
from quantcore.engine.evaluation.inputs import block_progress, find_model, held_out_text
from quantcore.engine.evaluation.model import EvaluatedModel, open_model
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.engine.evaluation.own_answers import compare_own_answers, prompts_of
from quantcore.engine.evaluation.provenance import environment, identity_of
from quantcore.engine.evaluation.reference import Reference, check_fits, measure_against
from quantcore.engine.evaluation.reference import read as read_reference
from quantcore.engine.evaluation.samples import compare_samples
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.model.kinds import Kind
from quantcore.engine.runtime.ranks import ALONE, Ranks
from quantcore.engine.verification.architecture import prove_tiny_model
from quantcore.errors import ConfigError, RankError, reason_of
from quantcore.events import Emit, PhaseStarted, silence
from quantcore.importing.model import read_model
from quantcore.report.evaluation_result import EvaluationResult
from quantcore.report.quality import AbsoluteQuality, Quality, TaskResults
from quantcore.report.verdict import judge_quality, with_behaviour


def evaluate(
    model_name: str,
    against: str | None,
    evaluation: EvaluationConfig,
    emit: Emit,
    *,
    vllm_python: str | None = None,
    ranks: Ranks = ALONE,
    reference_file: Path | None = None,
    cache_dtypes: Sequence[CacheDtype] = (),
) -> EvaluationResult:
    """Measure a model; the result has ``samples`` and ``harness`` if the ``evaluation`` requests them.

    Models are folders, GGUF files or ids on the Hub. Without an original nothing is compared; a ``reference_file``
    takes its place, with a text and answers of its own. With ``cache_dtypes`` the model is also measured with a KV
    cache of each of them. ``vllm_python`` is the
    interpreter of an environment with vLLM and lm_eval, in which the tasks run instead of in our engine. All ``ranks``
    call it: the first one measures the quality block by block, and all share the model where it must be whole. Raises
    ModelError, ConfigError.
    """
    _check(evaluation, vllm_python, ranks)
    if not ranks.is_first:
        emit = silence
    path = ranks.share(find_model(model_name, emit) if ranks.is_first else Path())
    original_path = ranks.share(find_model(against, emit) if against is not None and ranks.is_first else None)
    reference = None if reference_file is None else read_reference(reference_file)
    emit(PhaseStarted("verify"))
    fields: dict[str, Any] = {}
    if vllm_python:
        fields["harness"], fields["served_by"] = harness.run_in_vllm(evaluation, path, original_path, vllm_python)
    described = read_model(path)
    if ranks.is_first:
        prove_tiny_model(described, emit)
    model, tokenizer = open_model(described, ranks), load_tokenizer(path)
    text = held_out_text(path, evaluation) if reference is None else reference.text
    pair = None
    if original_path is not None:
        original = open_model(read_model(original_path), ranks)
        pair = ModelPair(original, model, BaselineCache(identity_of(original_path), ranks))
    if ranks.is_first and reference is not None:
        check_fits(reference, path)
        fields |= _measure_against(model, reference, emit)
        against = str(reference.about["model"])
    elif ranks.is_first:
        fields |= _measure(model, pair, text, emit)
    if ranks.is_first and cache_dtypes:
        fields["kv_caches"] = measure_cache_dtypes(model, text, cache_dtypes, emit)
    if pair is not None:
        arguments, is_causal = evaluation.chat_template_kwargs, model.streamed.kind is Kind.causal
        if evaluation.num_answers and is_causal:
            answers = compare_own_answers(path, arguments, prompts_of(evaluation), pair, emit)
            fields |= {} if answers is None else {"answers": answers}
        if evaluation.num_behaviour_prompts:
            assert original_path is not None
            prompts = read_prompt_set(evaluation.prompts, evaluation.num_behaviour_prompts)
            folders = original_path, path
            fields["behaviour"] = compare_behaviour(folders, arguments, prompts, evaluation.behaviour_len, pair, emit)
        if evaluation.num_prompts:
            fields["samples"] = compare_samples(path, arguments, text, evaluation.num_prompts, pair, emit)
    if evaluation.tasks and not vllm_python:
        fields["harness"], failed_tasks = _run_tasks(evaluation, tokenizer, model, pair)
    else:
        failed_tasks = {}
    if isinstance(quality := fields.get("quality"), Quality):
        verdict = judge_quality(quality, fields.get("harness"), fields.get("answers"))
        fields["verdict"] = with_behaviour(verdict, quality, fields.get("behaviour"))
    return EvaluationResult(
        model=model_name, against=against, environment=environment(), failed_tasks=failed_tasks, **fields
    )


def _measure_against(model: EvaluatedModel, reference: Reference, emit: Emit) -> dict[str, Any]:
    """Return ``quality`` and ``answers``, measured by a reference; and what the reference is."""
    states = model.last_states(reference.text, block_progress(emit, model))
    with model.vocabulary(states[0]) as vocabulary:
        measured = measure_against(reference.of_text, vocabulary, states, reference.text)
    fields: dict[str, Any] = {"quality": summarize_both(measured, reference.text), "reference": dict(reference.about)}
    answers = reference.answers
    if answers is not None and reference.of_answers is not None:
        states = answers.states(model.last_states(answers.shown, block_progress(emit, model)))
        with model.vocabulary(states[0]) as vocabulary:
            measured = measure_against(reference.of_answers, vocabulary, states, answers.scored)
        fields["answers"] = answers.quality(measured)
    return fields


def _run_tasks(
    evaluation: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, model: EvaluatedModel, pair: ModelPair | None
) -> tuple[harness.Results | TaskResults, dict[str, str]]:
    """Run the tasks; also return the reason for each task that failed, so that other measurements are not lost."""
    try:
        if pair is None:
            return harness.evaluate(evaluation, tokenizer, model), {}
        return harness.compare(evaluation, tokenizer, pair), {}
    except RankError:
        raise
    except Exception as error:  # code and data of others
        return {}, dict.fromkeys(evaluation.tasks, reason_of(error))


def _check(evaluation: EvaluationConfig, vllm_python: str | None, ranks: Ranks) -> None:
    """Raise ConfigError for an evaluation that cannot run."""
    if vllm_python is None:
        harness.check(evaluation)
        return
    harness.check_folder(evaluation)
    if not evaluation.tasks:
        raise ConfigError(
            "--vllm runs tasks, but none are given.", code="invalid_evaluation", hint="For example --tasks gsm8k."
        )
    if ranks.size > 1:
        raise ConfigError(
            f"vLLM distributes a model over devices itself, but {ranks.size} processes were started.",
            code="invalid_evaluation",
            hint="Run without torchrun or without --vllm.",
        )


def _measure(model: EvaluatedModel, pair: ModelPair | None, text: EvaluationText, emit: Emit) -> dict[str, Any]:
    """Return ``quality``, and ``drafts`` if the model has draft layers that Transformers can run."""
    if pair is None:
        states = model.last_states(text, block_progress(emit, model))
        with model.vocabulary(states[0]) as vocabulary:
            quality: AbsoluteQuality = summarize(measure(vocabulary, states, text), text)
        drafts = measure_drafts(Drafting(model, states), None, text.ids_NT, emit)
    else:
        original_states, states = pair.states(text, emit)
        quality = summarize_both(pair.measure(text, states, original_states), text)
        both = Drafting(model, states), Drafting(pair.original, original_states)
        drafts = measure_drafts(*both, text.ids_NT, emit)
    return {"quality": quality} | ({} if drafts is None else {"drafts": drafts})
