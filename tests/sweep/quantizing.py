"""One model quantized in four ways: what came of it, and which linear weights were left in float without a reason."""

from __future__ import annotations

import json
import re
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from quantcore.checkpoint.experts import unstack_experts
from quantcore.checkpoint.headers import read_tensor_headers
from quantcore.config import presets
from quantcore.config.task import Task
from quantcore.engine.pipeline import job
from quantcore.errors import QuantError
from tests.support.architectures import places
from tests.support.proofs import proving_here
from tests.sweep.classes import ModelClass, build, linear_weights, save

WAYS: dict[str, dict[str, Any]] = {
    "data-free": {"preset": "int8_dynamic"},
    "weight-only": {"preset": "int4_wo_per_channel", "algo_config": [{"name": "gptq"}]},
    "activation": {"preset": "int8", "algo_config": [{"name": "smoothquant"}, {"name": "gptq"}]},
    "file-to-file": {"preset": "int8_dynamic", "file2file": True},
}
"""Way of quantizing -> preset, algorithms and executor."""

NUM_SAMPLES, SEQ_LEN = 12, 32
EXPORTS = ("compressed_tensors", "fake_quantized")
"""The formats to write: the first that holds all layers of the model, and that Transformers reads.

GPT-2's ``Conv1D`` needs the second, and static scales of layers that Transformers cuts (GTE).
"""
TOWER = re.compile(r"vision|visual|audio|image|speech_|multi_modal_projector")
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Outcome:
    """One way for one model: ``ok``, ``refused`` (with the error's code) or ``crashed``.

    ``unexplained``: linear weights that are neither quantized nor in the list of kept ones. ``altered``: tensors of
    towers that are not bit for bit those of the model.
    """

    verdict: str
    detail: str = ""
    num_quantized: int = 0
    num_kept: int = 0
    unexplained: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    seconds: float = 0.0
    consumer: str = ""
    export: str = EXPORTS[0]


@dataclass(frozen=True)
class Row:
    """A class with the outcome of each way; ``not_built`` says why Transformers made no such model."""

    model_class: ModelClass
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    not_built: str = ""


def quantize_class(model_class: ModelClass, ways: tuple[str, ...] = tuple(WAYS)) -> Row:
    """Build a tiny model of the class and quantize it in each of ``ways``."""
    with tempfile.TemporaryDirectory(prefix="bitfoundry-sweep-") as scratch:
        folder = Path(scratch) / "model"
        try:
            model = build(model_class)
            save(model, folder)
        except Exception as error:  # a default config whose numbers do not fit together
            return Row(model_class, not_built=f"{type(error).__name__}: {error}".splitlines()[0][:200])
        text = Path(scratch) / "text.txt"
        text.write_text(" ".join(str(number * number % 9973) for number in range(4000)))
        outcomes = {way: quantize(folder, Path(scratch) / way, text, WAYS[way], model) for way in ways}
        return Row(model_class, outcomes)


def quantize(model_dir: Path, output_dir: Path, text: Path, how: Mapping[str, Any], model: PreTrainedModel) -> Outcome:
    """Run one job; see ``Outcome``."""
    for export in EXPORTS:
        outcome = quantize_to(export, model_dir, output_dir, text, how, model)
        if not outcome.detail.startswith(("incompatible_export", "consumer_reads_otherwise")):
            break
    return outcome


def quantize_to(
    export: str, model_dir: Path, output_dir: Path, text: Path, how: Mapping[str, Any], model: PreTrainedModel
) -> Outcome:
    """Run one job that writes one format."""
    started = time.monotonic()
    config = presets.resolve(how["preset"]).to_dict() | {"algo_config": how.get("algo_config", [])}
    task = Task.model_validate(
        {
            "model_dir": str(model_dir), "output_dir": str(output_dir), "config": config, "export": [export],
            "gate": "off", "file2file": how.get("file2file", False),
            "calibration": {"source": str(text), "num_samples": NUM_SAMPLES, "seq_len": SEQ_LEN},
            "evaluation": {"num_windows": 0 if "file2file" in how else 2, "seq_len": SEQ_LEN, "num_prompts": 0},
        }
    )  # fmt: skip
    try:
        with proving_here():
            job.run(task, lambda event: None)
    except QuantError as error:
        return Outcome("refused", f"{error.code}: {error.message}"[:300], seconds=time.monotonic() - started)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = next((frame for frame in reversed(frames) if "quantcore" in frame.filename), frames[-1])
        place = f"{Path(at.filename).name}:{at.lineno}"
        return Outcome("crashed", f"{place} {type(error).__name__}: {error}"[:300], seconds=time.monotonic() - started)
    return account(export, model_dir, output_dir, model, time.monotonic() - started)


def account(export: str, model_dir: Path, output_dir: Path, model: PreTrainedModel, seconds: float) -> Outcome:
    """Compare what the job wrote with the linear layers of ``model``'s module tree."""
    report = json.loads((output_dir / "report.json").read_text())
    stored = read_tensor_headers(model_dir)
    names = unstack_experts(stored)
    where = places(model, list(stored))
    fills = {name: where[name if header.stack is None else header.stack.name] for name, header in names.items()}
    written = read_tensors(output_dir)
    kept = {layer["name"] for layer in report["kept"]}
    linear = linear_weights(model, fills)
    rounded = {f"{layer['name']}.weight" for layer in report["layers"]} if export == EXPORTS[1] else set()
    floats = {name for name, tensor in written.items() if tensor.dtype in FLOAT_DTYPES} - rounded
    in_float = {name for name in linear if name in floats or ((stack := names[name].stack) and stack.name in floats)}
    is_explained = lambda name: name in kept or name.removesuffix(".weight") in kept  # noqa: E731
    unexplained = tuple(sorted(name for name in in_float if not is_explained(name)))
    check = report["proof"][export]["consumer_check"]
    consumer = check.get("not_checked") or f"{check['logit_difference']:.3f}"
    altered = altered_towers(read_tensors(model_dir), written)
    return Outcome(
        "ok", num_quantized=len(linear) - len(in_float), num_kept=len(in_float) - len(unexplained),
        unexplained=unexplained, altered=altered, seconds=seconds, consumer=consumer,
        export=export,
    )  # fmt: skip


def altered_towers(stored: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the tensors with the name of a part for images or sound that the output holds otherwise, or not."""
    towers = [name for name in stored if TOWER.search(name)]
    return tuple(name for name in towers if name not in written or not torch.equal(stored[name], written[name]))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        tensors |= load_file(path)
    return tensors
