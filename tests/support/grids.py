"""Models whose weights were quantized and written as floats again."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from quantcore.config import presets
from quantcore.engine.solvers.rtn import round_to_nearest


def on_grids(folder: Path, schemes: dict[str, str]) -> Path:
    """Round the weights with a part of these names, by the presets given for them, and write floats again."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        scheme = next((schemes[part] for part in schemes if f"{part}.weight" in name), None)
        if scheme is not None:
            spec = presets.PRESETS[scheme].layer_config.weight
            assert spec is not None
            tensors[name] = round_to_nearest(tensor, spec).dequantize().to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
