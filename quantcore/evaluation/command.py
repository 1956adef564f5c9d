"""``bitfoundry evaluate``: a model that is there already, whoever quantized it, alone or beside its original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from quantcore.checkpoint.tokenizer import load_tokenizer, tokenize_with
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig
from quantcore.data.windows import token_windows
from quantcore.errors import ConfigError, ModelError, RankError, reason_of
from quantcore.evaluation import harness
from quantcore.evaluation.architecture import prove_twin
from quantcore.evaluation.baseline_cache import BaselineCache
from quantcore.evaluation.divergence import measure, summarize
from quantcore.evaluation.model import EvaluatedModel, open_model
from quantcore.evaluation.provenance import environment, identity_of
from quantcore.evaluation.samples import PROMPT_LEN, compare_samples
from quantcore.evaluation.text import EvaluationText, of_windows, read_text
from quantcore.events import Emit, Eta, PhaseStarted, Progress, silence
from quantcore.hub import download as hub
from quantcore.reading.model import read_model
from quantcore.runtime.ranks import ALONE, Ranks


def evaluate(
    given: str, against: str | None, evaluation: EvaluationConfig, emit: Emit, *, vllm_python: str | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:  # fmt: skip
    """``quality`` (see ``divergence.summarize``), and where asked for ``samples`` and ``harness``, as in a report.

    Models are folders, GGUF files or ids on the Hub. Without an original nothing is compared. ``vllm_python``: the
    interpreter of an environment with vLLM and lm_eval, in which the tasks run instead of in our engine. With several
    ``ranks`` each calls it: the first one measures the quality, block by block, and all hold the model together where
    it is whole. Raises ModelError, ConfigError.
    """
    _check(evaluation, vllm_python, ranks)
    if not ranks.is_first:
        emit = silence
    path = ranks.share(find_model(given, emit) if ranks.is_first else Path())
    original_path = ranks.share(find_model(against, emit) if against is not None and ranks.is_first else None)
    emit(PhaseStarted("verify"))
    served = harness.run_in_vllm(evaluation, path, original_path, vllm_python) if vllm_python else {}
    found = read_model(path)
    if ranks.is_first:
        prove_twin(found, emit)
    model, tokenizer, text = open_model(found, ranks), load_tokenizer(path), _text(path, evaluation)
    before = None
    if original_path is not None:
        before = open_model(read_model(original_path), ranks), BaselineCache(identity_of(original_path), ranks)
    result: dict[str, Any] = {"model": given, "against": against, "environment": environment(), **served}
    if ranks.is_first:
        result["quality"] = _quality(model, before, text, emit)
    runs_tasks = evaluation.tasks and not vllm_python
    if before is not None and evaluation.num_prompts:
        prompts_NT = text.ids_NT[: evaluation.num_prompts, :PROMPT_LEN]
        result["samples"] = compare_samples(tokenizer, prompts_NT, before[0], model, before[1])
    return result | (_run_tasks(evaluation, tokenizer, model, before) if runs_tasks else {"failed_tasks": {}})


def _run_tasks(
    evaluation: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, model: EvaluatedModel,
    before: tuple[EvaluatedModel, BaselineCache] | None,
) -> dict[str, Any]:  # fmt: skip
    """``harness``, and ``failed_tasks`` with the reason where the harness breaks: what was measured before stays."""
    try:
        if before is None:
            return {"harness": harness.evaluate(evaluation, tokenizer, model), "failed_tasks": {}}
        return {"harness": harness.compare(evaluation, tokenizer, before[0], model, before[1]), "failed_tasks": {}}
    except RankError:
        raise
    except Exception as error:  # foreign code, and data from elsewhere
        return {"harness": {}, "failed_tasks": dict.fromkeys(evaluation.tasks, reason_of(error))}


def _check(evaluation: EvaluationConfig, vllm_python: str | None, ranks: Ranks) -> None:
    """Raises ConfigError for what cannot run."""
    if vllm_python is None:
        harness.check(evaluation)
        return
    harness.check_folder(evaluation)
    if not evaluation.tasks:
        raise ConfigError(
            "vLLM runs tasks, and none are named.", code="invalid_evaluation", hint="For example --tasks gsm8k."
        )
    if ranks.size > 1:
        raise ConfigError(
            f"vLLM shares a model among devices by itself, and these are {ranks.size} processes.",
            code="invalid_evaluation",
            hint="Leave torchrun out, or --vllm.",
        )


def _quality(
    model: EvaluatedModel, before: tuple[EvaluatedModel, BaselineCache] | None, text: EvaluationText, emit: Emit
) -> dict[str, Any]:
    states = model.last_states(text, _told(emit, model))
    if before is None:
        with model.head() as logits:
            return summarize(measure(logits, states, text), text)
    original, known = before
    original_states = _original_states(original, known, text, emit)
    with model.head() as logits, original.head() as original_logits:
        return summarize(measure(logits, states, text, (original_logits, original_states)), text)


def find_model(given: str, emit: Emit) -> Path:
    """A folder or file as it is; what looks like a Hub id is downloaded. Raises ModelError ``model_not_found``."""
    path = Path(given)
    if path.exists():
        return path
    if hub.is_model_id(given):
        emit(PhaseStarted("download"))
        return hub.download(given, hub.resolve(given), emit)
    raise ModelError(
        f"There is no model at {given}.",
        code="model_not_found",
        hint="Give a folder with config.json, a GGUF file, or a model on the Hub: org/name.",
    )


def _text(path: Path, evaluation: EvaluationConfig) -> EvaluationText:
    """That of the evaluation, else what calibration with the built-in text would hold out."""
    tokenizer = load_tokenizer(path)
    if evaluation.source is not None:
        return read_text(evaluation, tokenizer)
    windows = token_windows(
        CalibrationConfig(num_samples=1, seq_len=8),
        tokenize_with(tokenizer),
        num_held_out=evaluation.num_windows,
        held_out_len=evaluation.seq_len,
        separator=tokenizer.eos_token_id,
    )
    return of_windows(windows.held_out_NT, tokenizer)


def _original_states(
    original: EvaluatedModel, known: BaselineCache, text: EvaluationText, emit: Emit
) -> list[torch.Tensor]:
    asked = {"windows": text.ids_NT.tolist()}
    states_NTH = known.states(asked, lambda: original.last_states_NTH(text, _told(emit, original)))
    return [state[None].to(original.streamed.device) for state in states_NTH]


def _told(emit: Emit, model: EvaluatedModel) -> Any:
    num_blocks = len(model.streamed.blocks)
    eta = Eta(num_blocks)
    return lambda done: emit(Progress("verify", done, num_blocks, "block", eta.after(done)))
