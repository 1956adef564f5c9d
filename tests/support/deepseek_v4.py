"""A checkpoint as DeepSeek-V4 is published: fp8 in blocks, experts in fp4, scales that are powers of two."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.support.modelopt import STEPS

SIDE = 8
"""The side of the blocks; 128 in the published files."""


def publish_as_v4(model_dir: Path) -> dict[str, torch.Tensor]:
    """Quantize the layers of the blocks in ``model_dir``; return their float32 weights by Transformers' own decoder."""
    path = model_dir / "model.safetensors"
    stored, expected = {}, {}
    for name, weight in load_file(path).items():
        in_block = ".layers." in name and name.endswith(".weight") and weight.ndim == 2
        if ".ffn.experts." in name:
            codes, scale = _in_fp4(weight.float())
        elif in_block and not any(side % SIDE for side in weight.shape) and ".gate." not in name:
            codes, scale = _in_blocks(weight.float())
        else:
            stored[name] = weight
            continue
        stored |= {name: codes, f"{name.removesuffix('.weight')}.scale": scale}
        expected[name] = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    save_file(stored, path)
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
        "weight_block_size": [SIDE, SIDE],
    }  # fmt: skip
    (model_dir / "config.json").write_text(json.dumps(config))
    return expected


def _in_blocks(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = weight_OI.unflatten(0, (-1, SIDE)).unflatten(2, (-1, SIDE))
    scale = (blocks.abs().amax((1, 3)) / 448).log2().ceil().exp2()
    codes = (blocks / scale[:, None, :, None]).reshape(weight_OI.shape).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.float8_e8m0fnu)


def _in_fp4(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight_OI.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 6).log2().ceil().exp2()
    codes = (groups.abs() / scale[..., None]).unsqueeze(-1).sub(STEPS).abs().argmin(-1)
    nibbles = (codes + 8 * (groups < 0)).view(len(weight_OI), -1).to(torch.uint8)
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(torch.int8), scale.to(torch.float8_e8m0fnu)
