"""ggml itself reads our blocks as we do, to the last bit, and makes the same blocks of rows that leave it no choice.

It needs ``make consumers`` (an environment of its own); ``make test-all`` runs this.
"""

import numpy
import pytest
import torch

from quantcore.config.gguf_types import GGUF_TYPES
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.export.gguf.gguf_exporter import BLOCKS
from quantcore.tensors.affine import QParams
from quantcore.tensors.qtensor import QTensor
from tests.support.consumers import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FORCED = ("TQ1_0", "TQ2_0", "MXFP4", "NVFP4")
TYPES = ("IQ1_S", "IQ1_M", *FORCED)


def forced(name: str) -> QTensor:
    """A weight with random codes and scales, with the largest value in every group, and no code of -0."""
    spec, generator = GGUF_TYPES[name], torch.Generator().manual_seed(0)
    largest = spec.format.encode(torch.tensor([spec.format.max]))
    codes = torch.randint(0, 16 if spec.format.bits == 4 else 3, (8, 1024), generator=generator).to(torch.uint8)
    if spec.format.bits == 4:
        codes[codes == 8] = 0
    groups = codes.reshape(8, -1, spec.group_size)
    groups[..., 5] = largest
    scale = 0.001 + torch.rand(groups.shape[:2], generator=generator)
    if name == "MXFP4":
        scale = scale.log2().floor().exp2()
    elif name == "NVFP4":
        scale = scale.to(torch.float8_e4m3fn).float()
    else:
        scale = scale.half().float()
    return QTensor(codes, QParams(scale), spec)


def test_ggml_reads_and_writes_the_same_blocks(tmp_path):
    weight = 0.02 * torch.randn(16, 1024, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[5, 7] = 1
    rounded = {name: round_to_nearest(weight, GGUF_TYPES[name]) for name in TYPES}
    chosen = {name: forced(name) for name in FORCED}
    given = {f"{name}.data": BLOCKS[name].encode(each).numpy() for name, each in rounded.items()}
    given |= {f"{name}.rows": each.dequantize().numpy() for name, each in chosen.items()}
    numpy.savez(tmp_path / "in.npz", **given)
    assert check("llamacpp", "check_ggml_blocks.py", tmp_path / "in.npz", tmp_path / "out.npz")
    found = numpy.load(tmp_path / "out.npz")
    for name in TYPES:
        assert numpy.array_equal(found[f"{name}.floats"], rounded[name].dequantize().numpy()), name
    for name in FORCED:
        assert numpy.array_equal(found[f"{name}.blocks"], BLOCKS[name].encode(chosen[name]).numpy()), name
