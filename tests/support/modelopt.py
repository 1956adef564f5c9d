"""A checkpoint as NVIDIA ModelOpt writes NVFP4, made here with plain operations."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

STEPS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def publish_as_nvfp4(model_dir: Path, *, has_own_file: bool) -> dict[str, torch.Tensor]:
    """Quantize the linear layers of the blocks in ``model_dir``; return the float32 weights that they stand for."""
    path = model_dir / "model.safetensors"
    stored, expected = {}, {}
    for name, weight in load_file(path).items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        groups = weight.float().view(len(weight), -1, 16)
        above = groups.abs().max() / (6 * 448)
        scale = (groups.abs().amax(-1) / 6 / above).to(torch.float8_e4m3fn)
        step = scale.float() * above
        codes = (groups.abs() / step[..., None]).unsqueeze(-1).sub(STEPS).abs().argmin(-1)
        expected[name] = (STEPS[codes] * groups.sign() * step[..., None]).view_as(weight)
        nibbles = (codes + 8 * (groups < 0)).view(len(weight), -1).to(torch.uint8)
        module = name.removesuffix(".weight")
        stored |= {
            name: nibbles[:, ::2] | nibbles[:, 1::2] << 4,
            f"{module}.weight_scale": scale,
            f"{module}.weight_scale_2": above,
            f"{module}.input_scale": torch.tensor(0.01),
        }
    save_file(stored, path)
    config = json.loads((model_dir / "config.json").read_text())
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    if has_own_file:
        own = {"producer": {"name": "modelopt"}, "quantization": {**quantization, "kv_cache_quant_algo": None}}
        (model_dir / "hf_quant_config.json").write_text(json.dumps(own))
    else:
        config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    (model_dir / "config.json").write_text(json.dumps(config))
    return expected
