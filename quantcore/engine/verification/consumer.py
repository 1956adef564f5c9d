"""Checks that another program, Transformers, reads an export and computes the same from it as our engine.

Transformers loads the files, and its logits of one short window of tokens are compared with those of our engine.
Neither rounds inputs, because programs round them differently at ties, and Transformers does not round those of fused
experts. So the check covers everything that the files say of the weights: names, codes, scales, layouts.

No code of the model's folder runs. Transformers sees the tensors, and a config.json without the keys that name code.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from logging import CRITICAL
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from quantcore.checkpoint.experts import is_in_stack
from quantcore.checkpoint.folder import find_gguf, gguf_parts
from quantcore.checkpoint.harmless import harmless_config
from quantcore.checkpoint.headers import read_json
from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.checkpoint.model_config import ModelConfig
from quantcore.checkpoint.private_copies import opened_weights
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.model.kinds import declared_class, inputs_of, language_model, outputs_of
from quantcore.engine.model.parameter_names import stores_single_experts
from quantcore.engine.model.skeleton import build_declared, clean_config, kind_of
from quantcore.engine.runtime.devices import release_freed_memory
from quantcore.errors import ModelError, ProofError
from quantcore.events import Emit, Warned
from quantcore.export.exporter import readers_of
from quantcore.export.unread import unread
from quantcore.importing.model import Model
from quantcore.report.quality import ConsumerCheck

WINDOW_LEN = 32  # tokens

IN_FLOAT32 = 1e-3
"""Allowed difference in float32. Measured: 0 for every scheme in 12 architectures, as neither side rounds."""
IN_BFLOAT16 = 0.3
"""Allowed difference with weights rounded to bfloat16 (see ``Readers.transformers_dtype``). Measured: 0.06.

A rounded router may choose another expert for a token. A model with random tensors differs by 0.5 and more.
"""
ROUNDS_INPUTS = 0.3
"""Allowed difference for LLM.int8(), which always rounds inputs. Measured: 0.06."""


def needed_bytes(tensors: Mapping[str, TensorHeader], layout: Mapping[str, TensorLayout]) -> int:
    """Return the memory of ``check_export``: the model in float32 beside the tensors of the export."""
    num_values = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return 4 * num_values + sum(tensor.num_bytes for tensor in layout.values())


def check_export(
    export: str,
    layers: tuple[LayerPlan, ...],
    folder: Path,
    original: Model,
    ours: Callable[[torch.dtype], EvaluatedModel],
    emit: Emit,
) -> ConsumerCheck:
    """Read the ``export`` in ``folder`` with Transformers; its ``layers`` were planned for ``original``.

    ``ours`` opens the same files with our engine, to compute in a dtype. Raises ProofError for files that are read
    without an error as another model: with tensors left random, or with other logits.
    """
    if reason := unread(export, layers):
        return ConsumerCheck(not_checked=reason)
    gguf_file = find_gguf(folder)
    if gguf_file is not None and len(gguf_parts(gguf_file)) > 1:
        return ConsumerCheck(
            not_checked="Transformers reads only the first part of a GGUF file that is split.", is_refused=True
        )
    config, readers = original.headers.config, readers_of(export)
    if readers.stores_each_expert and _holds_only_stacks(config, layers):
        return ConsumerCheck(
            not_checked=f"Transformers reads stacks of experts only for '{config.get('model_type')}', and"
            f" {export.replace('_', '-')} stores each expert.",
            is_refused=True,
        )
    try:
        program = _program(readers.transformers_package)
        ids_NT = _window(config)
    except PackageNotFoundError as error:
        return ConsumerCheck(not_checked=f"{error.name} is not installed.")
    except ModelError as error:
        return ConsumerCheck(not_checked=error.message)
    dtype = getattr(torch, readers.transformers_dtype(layers))
    try:
        theirs_TV, missing = _read_elsewhere(export, folder, original, dtype, ids_NT)
    except Exception as error:  # any error of another program
        reason = f"{program} cannot load and run these files: {str(error).strip()[:300] or type(error).__name__}"
        if readers.for_transformers:
            emit(Warned("consumer_check", reason))
        return ConsumerCheck(not_checked=reason, is_refused=True)
    if missing:
        raise ProofError(
            f"{program} finds no values in the {export} files for {len(missing)} tensor(s) of the model, first "
            f"'{missing[0]}', and initializes them randomly.",
            code="consumer_reads_otherwise",
            hint="Use another format (fake_quantized loads as a regular model). Please report this as a bug.",
        )
    release_freed_memory()
    try:
        model = ours(dtype)
        ours_TV = _logits(model if readers.rounds_inputs(layers) else replace(model, layers=(), activations={}), ids_NT)
    except ModelError as error:
        return ConsumerCheck(not_checked=f"{program} loads the files; their logits were not compared: {error.message}")
    difference, allowed = (
        ((theirs_TV - ours_TV).norm() / ours_TV.norm()).item(),
        _allowed(dtype, rounds_inputs=readers.rounds_inputs(layers)),
    )
    if not difference <= allowed:
        raise ProofError(
            f"{program} computes different logits from the {export} files: relative difference {difference:.2e}, "
            f"limit {allowed:.0e}.",
            code="consumer_reads_otherwise",
            hint="Use another format (fake_quantized loads as a regular model). Please report this as a bug.",
        )
    return ConsumerCheck(consumer=program, logit_difference=difference)


def _holds_only_stacks(config: Mapping[str, Any], layers: tuple[LayerPlan, ...]) -> bool:
    """Return True if ``layers`` has experts, and Transformers has no names for single experts of this model."""
    if not any(is_in_stack(layer.name) for layer in layers):
        return False
    try:
        return not stores_single_experts(build_declared(dict(config)))
    except ModelError:
        return False


def _program(package: str | None) -> str:
    """Return the name of the program that reads the files, with versions. Raises PackageNotFoundError."""
    beside = "" if package is None else f" with {package} {version(package)}"
    return f"Transformers {version('transformers')}{beside}"


def _window(config: Mapping[str, Any]) -> torch.Tensor:
    """Return token ids [1, T] without special tokens. Raises ModelError for a model that Transformers does not know."""
    text_config = clean_config(dict(config)).get_text_config()
    special = {value for key, value in _items(config) if key.endswith(("token_id", "token_index"))}
    sizes = ModelConfig(config).vocab_sizes
    vocab_size = ModelConfig(text_config.to_dict()).vocab_size or min(sizes, default=WINDOW_LEN)
    usual = [token for token in range(min(vocab_size, 4 * WINDOW_LEN)) if token not in special]
    return torch.tensor([usual[::-3][:WINDOW_LEN]])


def _items(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _items(value)
        elif not isinstance(value, list):
            yield key, value


def _read_elsewhere(
    export: str, folder: Path, original: Model, dtype: torch.dtype, ids_NT: torch.Tensor
) -> tuple[torch.Tensor, list[str]]:
    """Return logits [T, V] by Transformers, and the tensors that it misses here but not in the ``original``."""
    with quiet(), torch.inference_mode():
        model, missing = _load(folder, original, dtype=dtype)
        declared = declared_class(original.headers.config)
        if isinstance(declared, type) and issubclass(declared, PreTrainedModel) and not isinstance(model, declared):
            raise ValueError(f"it loads the model as {type(model).__name__} instead of {declared.__name__}")
        if missing:
            missing -= _missing_before(original)
        if missing:
            return torch.empty(0), sorted(missing)
        for module in model.modules():
            vars(module)["quantization_enabled"] = False  # compressed-tensors: rounding of inputs and outputs
        kind = kind_of(original.headers.config)
        reader = language_model(model, kind)
        return outputs_of(reader(**inputs_of(reader, kind, ids_NT)))[0].float(), []


def _missing_before(original: Model) -> set[str]:
    """Return the tensors that Transformers does not find in the float model either."""
    try:
        return _load(original.folder, original, device_map="meta")[1]
    except Exception:  # then none are known
        return set()


def _load(folder: Path, original: Model, **options: Any) -> tuple[PreTrainedModel, set[str]]:
    """Load the model in ``folder``; return it with the names of its tensors that the files do not fill.

    A GGUF file is loaded with the config of ``original``, because Transformers reads too little from the file itself.
    """
    gguf_file = find_gguf(folder)
    with opened_weights(folder) as scratch, nullcontext() if gguf_file is None else _names_mapped_once():
        if gguf_file is None:
            raw = read_json(folder / "config.json", "no_config")
            quantization = {key: raw[key] for key in ("quantization_config",) if key in raw}
            (scratch / "config.json").write_text(json.dumps(harmless_config(raw)[0] | quantization), "utf-8")
            kind = declared_class(raw)
        else:
            kind = declared_class(original.headers.config)
            options |= {"gguf_file": gguf_file.name, "config": clean_config(original.headers.config)}
        model, loading_info = kind.from_pretrained(
            scratch, local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
        )
        return model, set(loading_info["missing_keys"])


@contextmanager
def _names_mapped_once() -> Iterator[None]:
    """Keep gguf's map of names while this lasts: Transformers makes one for each module, which takes seconds."""
    import gguf

    with patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        yield


def _logits(model: EvaluatedModel, ids_NT: torch.Tensor) -> torch.Tensor:
    """Return logits [T, V] by our engine, with one block in memory at a time."""
    hidden = model.streamed.embed(ids_NT)
    model.run(hidden, lambda done: None)
    with model.head() as logits:
        return logits(hidden.states[0])[0].float().cpu()


def _allowed(dtype: torch.dtype, *, rounds_inputs: bool) -> float:
    if rounds_inputs:
        return ROUNDS_INPUTS
    return IN_FLOAT32 if dtype is torch.float32 else IN_BFLOAT16


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Transformers while this lasts: stdout is for events, and our own errors name missing tensors."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity(CRITICAL)
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]
