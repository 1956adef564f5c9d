"""``bitfoundry imatrix``: runs a text through a model, and writes the mean squares of the inputs for llama.cpp's tools.

As ``llama-imatrix`` does, of all linear layers of the decoder blocks; not of the output projection.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.texts import CalibrationConfig
from quantcore.engine.calibration.imatrix import CHUNK_SIZE, DATASETS, NUM_CHUNKS, InputSums, in_file, write_imatrix
from quantcore.engine.containers.gguf import places_of
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.data.windows import token_windows
from quantcore.engine.evaluation.inputs import find_model
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.text import document_tokenizer
from quantcore.engine.verification.architecture import prove_tiny_model
from quantcore.events import Emit, Eta, PhaseStarted, Progress
from quantcore.export.gguf.tensor_names import Place
from quantcore.importing.model import read_model
from quantcore.plan.job import text_with_model_defaults
from quantcore.plan.planner import make_plan

EXPORT = "compressed_tensors"  # any that takes the layers of all architectures


def imatrix(model_name: str, file: Path, calibration: CalibrationConfig, emit: Emit) -> dict[str, Any]:
    """Write the importance matrix of a model, one decoder block at a time; ``file`` appears whole.

    Returns the numbers of its tensors and of the tokens. Raises ModelError and ConfigError for a model that llama.cpp
    has no names for, CalibrationError for a text that is too short.
    """
    path = find_model(model_name, emit)
    emit(PhaseStarted("plan"))
    described = read_model(path)
    headers = described.headers
    places = places_of(headers.config, headers.tensors)
    calibration = text_with_model_defaults(calibration, headers.config)
    every_layer = presets.resolve("int8_weight_only")
    plan = make_plan(JobSpec(config=every_layer, calibration=calibration, export=(EXPORT,)), headers)
    prove_tiny_model(described, emit)
    ids_NT = windows_of(path, calibration)
    emit(PhaseStarted("quantize"))
    model, eta = open_model(described).streamed, Eta(plan.num_blocks)
    hidden = model.embed(ids_NT)
    sums: dict[str, InputSums] = {}
    for index in range(plan.num_blocks):
        model.enter(index, hidden)
        with model.block(index) as block:
            modules = {layer.name: model.find_module(layer.name) for layer in plan.layers_of(index)}
            with _watched(modules, sums):
                model.run_block(block, index, hidden)
        emit(Progress("quantize", index + 1, plan.num_blocks, "block", eta.after(index + 1)))
    tensors = _by_tensor(sums, places)
    settings = {
        DATASETS: [part.source for part in calibration.parts], NUM_CHUNKS: len(ids_NT), CHUNK_SIZE: ids_NT.shape[1],
    }  # fmt: skip
    write_imatrix(file, tensors, settings)
    return {"num_tensors": len(tensors), "num_tokens": ids_NT.numel(), "file": str(file)}


def windows_of(path: Path, calibration: CalibrationConfig) -> torch.Tensor:
    """Return the calibration windows [N, T] that a job with this calibration learns from."""
    tokenizer = document_tokenizer(path, load_tokenizer(path), calibration.chat_template_kwargs)
    return token_windows(calibration, tokenizer, num_held_out=0, held_out_len=calibration.seq_len).calibration_NT


@contextmanager
def _watched(modules: Mapping[str, nn.Module], sums: dict[str, InputSums]) -> Iterator[None]:
    """Add the inputs of ``modules`` to ``sums`` while this lasts. A module that gets no token has sums of 0."""

    def add(name: str, x: torch.Tensor) -> None:
        x_TI, before = x.detach().reshape(-1, x.shape[-1]).float(), sums[name]
        total_I, square_I = x_TI.sum(0, dtype=torch.float64), x_TI.square().sum(0, dtype=torch.float64)
        sums[name] = InputSums(before.sum_I + total_I, before.square_I + square_I, before.num_tokens + len(x_TI))

    handles = []
    for name, module in modules.items():
        weight = module.get_parameter("weight")
        nothing_I = torch.zeros(_num_inputs(module), dtype=torch.float64, device=weight.device)
        sums[name] = InputSums(nothing_I, nothing_I, 0)
        handles.append(module.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _num_inputs(module: nn.Module) -> int:
    """Return the number of inputs of a linear layer, whose weight is [O, I], or [I, O] in Transformers' Conv1D."""
    weight = module.get_parameter("weight")
    return int(weight.shape[-1] if isinstance(module, nn.Linear) else weight.shape[0])


def _by_tensor(sums: Mapping[str, InputSums], places: Mapping[str, tuple[Place, ...]]) -> dict[str, list[InputSums]]:
    """Return the sums of each of llama.cpp's tensors, of a stack those of each expert in order."""
    found: defaultdict[str, dict[int, InputSums]] = defaultdict(dict)
    for layer, own in sums.items():
        for place in places.get(f"{layer}.weight", ()):
            moved = InputSums(in_file(own.sum_I, place), in_file(own.square_I, place), own.num_tokens)
            found[place.name].setdefault(place.index or 0, moved)  # parts of one tensor read the same input
    return {name: [parts[index] for index in sorted(parts)] for name, parts in found.items()}
