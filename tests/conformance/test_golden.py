"""The bytes of every format stay what they are: a refactoring must not change what consumers were seen to read.

``golden.json`` holds the sha256 of what each exporter stores of one layer for each config that it takes. After a change
that is meant: ``python -m tests.conformance.test_golden`` writes it anew; the diff says which formats changed.
"""

import hashlib
import json
from pathlib import Path

import torch

from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.export import EXPORTERS, Container, adapted
from quantcore.tensors.qtensor import QLayer
from quantcore.tensors.source import TORCH_DTYPES
from tests.support.exporting import CONFIGS, static

GOLDEN = Path(__file__).with_name("golden.json")
SHAPE = (128, 256)


def weight():
    """Numbers that need no random generator and no rounding, so that every machine has the same."""
    rows, columns = torch.meshgrid(torch.arange(SHAPE[0]), torch.arange(SHAPE[1]), indexing="ij")
    whole = (rows * 7919 + columns * 104_729 + rows * columns * 31) % 509 - 254
    return (whole / 256).bfloat16()


def stored(exporter, config):
    """sha256 over the names, dtypes, shapes and bytes of the layer's tensors."""
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, SHAPE, config)
    quantized = QLayer(
        round_to_nearest(weight(), layer.weight), static(config.input_tensors), static(config.output_tensors)
    )
    layout, found = exporter.layout(layer, "BF16"), hashlib.sha256()
    for part, tensor in sorted(exporter.encode(layer, quantized, "BF16").items()):
        found.update(f"{part} {layout[part].dtype} {list(layout[part].shape)}".encode())
        found.update(tensor.to(TORCH_DTYPES[layout[part].dtype]).contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def all_hashes():
    hashes = {}
    for name in EXPORTERS:
        exporter = EXPORTERS.get(name)
        for config_name, config in CONFIGS.items():
            layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, SHAPE, config)
            if exporter.refuse(layer) is None:
                if not isinstance(exporter, Container):  # GGUF's bytes have been those of other scales from the start
                    config = adapted((layer,), (name,))[0][0].config  # as the plan does
                hashes[f"{name} {config_name}"] = stored(exporter, config)
    return hashes


def test_no_byte_of_a_known_format_changed():
    golden, found = json.loads(GOLDEN.read_text()), all_hashes()
    assert len(golden) > 80
    assert found == golden


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(all_hashes(), indent=1) + "\n")
