"""``bitfoundry reference``: writes what a model predicts, to measure results by later, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantcore.config.task import EvaluationConfig
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.inputs import find_model, held_out_text, states_of_original
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.own_answers import answer_prompts, prompts_of
from quantcore.engine.evaluation.provenance import environment, identity_of
from quantcore.engine.evaluation.reference import NUM_TOP, Reference, predictions_of, spelling, write
from quantcore.engine.model.kinds import Kind
from quantcore.engine.verification.architecture import prove_tiny_model
from quantcore.errors import ConfigError
from quantcore.events import Emit, PhaseStarted
from quantcore.importing.model import read_model


def make_reference(model_name: str, evaluation: EvaluationConfig, output: Path, emit: Emit) -> dict[str, Any]:
    """Write the reference of a model for the text that ``evaluation`` names, and for its own answers.

    Returns what is in it, as JSON data. Raises ModelError, CalibrationError, and ConfigError ``no_reference`` for a
    model that predicts no next token, or a text with images or sound.
    """
    path = find_model(model_name, emit)
    emit(PhaseStarted("verify"))
    described = read_model(path)
    prove_tiny_model(described, emit)
    model, text = open_model(described), held_out_text(path, evaluation)
    if model.streamed.kind is not Kind.causal or text.media:
        what = "text with images or sound" if text.media else "models that predict no next token"
        raise ConfigError(
            f"There are no references for {what}.", code="no_reference", hint="Measure with --against MODEL instead."
        )
    baselines = BaselineCache(identity_of(path))
    states = states_of_original(model, baselines, text, emit)
    with model.vocabulary(states[0]) as vocabulary:
        of_text = predictions_of(vocabulary, states, text)
    del states
    arguments, answers, of_answers = evaluation.chat_template_kwargs, None, None
    if evaluation.num_answers:
        answers = answer_prompts(model, baselines, path, arguments, prompts_of(evaluation), emit)
    if answers is not None:
        states = answers.states(states_of_original(model, baselines, answers.shown, emit))
        with model.vocabulary(states[0]) as vocabulary:
            of_answers = predictions_of(vocabulary, states, answers.scored)
    about = {"model": model_name, "identity": baselines.model, "environment": environment()}
    write(Reference(about, spelling(text, answers, load_tokenizer(path)), text, of_text, answers, of_answers), output)
    return {
        "output": str(output),
        "model": model_name,
        "identity": baselines.model,
        "num_tokens": len(of_text.losses_S),
        "num_answers": 0 if answers is None else len(answers.starts),
        "num_predictions": min(NUM_TOP, of_text.top_SK.shape[1]),
        "size_bytes": output.stat().st_size,
    }
