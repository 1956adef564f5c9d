"""``bitfoundry compare NEW OLD --against ORIGINAL``: measures whether a result is worse than an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from quantcore.checkpoint.model_config import ModelConfig
from quantcore.config.task import EvaluationConfig
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.divergence import Measured, measure, summarize_both
from quantcore.engine.evaluation.inputs import block_progress, find_model, held_out_text, states_of_original
from quantcore.engine.evaluation.model import EvaluatedModel, open_model
from quantcore.engine.evaluation.paired import compare_measured, mean_of
from quantcore.engine.evaluation.provenance import environment, identity_of
from quantcore.engine.evaluation.text import EvaluationText, for_kind
from quantcore.engine.runtime.vocabulary import Vocabulary
from quantcore.engine.verification.architecture import prove_tiny_model
from quantcore.errors import ConfigError
from quantcore.events import Emit, PhaseStarted
from quantcore.importing.model import read_model
from quantcore.report.compare import read_report
from quantcore.report.quality import PairedQuality


def measure_change(
    new: Sequence[str],
    old: Sequence[str],
    against: str,
    evaluation: EvaluationConfig,
    emit: Emit,
    *,
    tolerance: float = 0.0,
) -> PairedQuality:
    """Measure two results of one model on the same tokens, as many as ``evaluation`` requests or the text has.

    ``new`` and ``old`` have one result each, or several of one recipe. Models are folders, GGUF files or ids on the
    Hub. The original is run once, or not at all if the cache has its states; all are run block by block. Raises
    ModelError, CalibrationError, and ConfigError as ``compare_measured`` does, or ``not_comparable`` for a result of
    another model.
    """
    names = (*new, *old)
    original_path, *paths = (find_model(name, emit) for name in (against, *names))
    emit(PhaseStarted("verify"))
    described, identity = read_model(original_path), identity_of(original_path)
    original, models = open_model(described), [open_model(read_model(path)) for path in paths]
    kind = original.streamed.kind
    if not kind.predicts_tokens:
        raise ConfigError(
            f"{against} does not predict tokens ({kind}), so there is no divergence to compare.",
            code="not_comparable",
            hint="Compare the reports of such results: bitfoundry compare NEW OLD.",
        )
    for name, path, model in zip(names, paths, models, strict=True):
        _check_origin(name, path, model, original, identity, against)
    prove_tiny_model(described, emit)
    text = for_kind(held_out_text(original_path, evaluation, fewer=True), kind, load_tokenizer(original_path))
    states = states_of_original(original, BaselineCache(identity), text, emit)
    with original.vocabulary(states[0]) as vocabulary:
        measured = [_measured(model, (vocabulary, states), text, emit) for model in models]
    of_new, of_old = measured[: len(new)], measured[len(new) :]
    return PairedQuality(
        new=", ".join(new),
        old=", ".join(old),
        against=against,
        environment=environment(),
        new_quality=summarize_both(mean_of(of_new), text),
        old_quality=summarize_both(mean_of(of_old), text),
        **compare_measured(of_new, of_old, text.scored_NP, tolerance, text.strata_N),
    )


def _measured(
    model: EvaluatedModel, original: tuple[Vocabulary, Sequence[torch.Tensor]], text: EvaluationText, emit: Emit
) -> Measured:
    states = model.last_states(text, block_progress(emit, model))
    with model.vocabulary(states[0]) as vocabulary:
        return measure(vocabulary, states, text, original)


def _check_origin(
    name: str, path: Path, model: EvaluatedModel, original: EvaluatedModel, identity: str, against: str
) -> None:
    """Raise ConfigError ``not_comparable`` if the result was made from a different model than ``against``.

    Its report names that model by a hash of its files, or by its id on the Hub. A result without a report must at least
    have the original's shapes.
    """
    made_from = ""
    with suppress(ConfigError):
        made_from = read_report(path).provenance.model
    is_other = made_from.startswith("sha256:") and identity.startswith("sha256:") and made_from != identity
    if made_from.startswith("hub:") and not Path(against).exists():
        is_other = made_from.partition("@")[0] != f"hub:{against}" or "+adapter:" in made_from
    if is_other or _shape_of(model) != _shape_of(original):
        raise ConfigError(
            f"{name} was made from a different model than {against}.",
            code="not_comparable",
            hint="Provide the model that both results were made from.",
        )


def _shape_of(model: EvaluatedModel) -> tuple[object, ...]:
    """Return that of the text part of a config in which a result does not differ from its original."""
    config = model.streamed.model.config.get_text_config()
    sizes = ModelConfig(config.to_dict())
    return config.model_type, sizes.vocab_size, sizes.hidden_size, sizes.num_layers
