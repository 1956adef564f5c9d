"""The inputs of all engines: token windows, cut once and saved to a file, and a small cut of the model for trials."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig
from quantcore.engine.data.chat_template import chat_renderer
from quantcore.engine.data.tokenizer import begin_of_text, load_tokenizer
from quantcore.engine.data.windows import DocumentTokenizer, TokenWindows, token_windows


def cut_windows(
    model_dir: Path, file: Path, calibration: CalibrationConfig, evaluation: EvaluationConfig, num_more: int = 0
) -> str:
    """Cut the windows of a text as our engine does, write them to ``file``, and return the sha256 of the tokens.

    Calibration windows come from the first three quarters of the text, held-out ones from the last. ``num_more`` more
    calibration windows are for what tunes after an algorithm that had the others.
    """
    windows = _cut(model_dir, calibration, evaluation)
    tensors = {"calibration": windows.calibration_NT, "held_out": windows.held_out_NT}
    if num_more:
        count = calibration.num_samples + num_more
        seen = set(map(tuple, windows.calibration_NT.tolist()))
        drawn_NT = _cut(model_dir, calibration.model_copy(update={"num_samples": count}), evaluation).calibration_NT
        tensors["more"] = torch.stack([ids_T for ids_T in drawn_NT if tuple(ids_T.tolist()) not in seen][:num_more])
    save_file(tensors, file)
    return digest(windows)


def _cut(model_dir: Path, calibration: CalibrationConfig, evaluation: EvaluationConfig) -> TokenWindows:
    tokenizer = load_tokenizer(model_dir)
    return token_windows(
        calibration,
        DocumentTokenizer(
            lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            begin_of_text(tokenizer),
            tokenizer.eos_token_id,
            chat_renderer(tokenizer, calibration.chat_template_kwargs),
        ),
        num_held_out=evaluation.num_windows,
        held_out_len=evaluation.seq_len,
    )


def digest(windows: TokenWindows) -> str:
    """Return the sha256 over shape and tokens of both kinds of windows."""
    sha256 = hashlib.sha256()
    for tensor in (windows.calibration_NT, windows.held_out_NT):
        sha256.update(str(tuple(tensor.shape)).encode())
        sha256.update(tensor.contiguous().numpy().tobytes())
    return sha256.hexdigest()


def cut_model(model_dir: Path, folder: Path, num_blocks: int) -> None:
    """Write the first ``num_blocks`` decoder blocks of a model in one safetensors file as a model of their own."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] = num_blocks
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_blocks]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (model_dir / file).is_file():
            (folder / file).write_bytes((model_dir / file).read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(model_dir / "model.safetensors", "pt") as source:
        for name in source.keys():  # noqa: SIM118  # it is no mapping
            parts = name.split(".")
            if "layers" not in parts or int(parts[parts.index("layers") + 1]) < num_blocks:
                tensors[name] = source.get_tensor(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
