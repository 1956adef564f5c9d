"""A model folder as a streamed model."""

from pathlib import Path

import torch

from quantcore.checkpoint.blocks import find_blocks
from quantcore.checkpoint.headers import read_local
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.engine.runtime.weight_loader import StoredWeights
from quantcore.tensors.source import Source


def streamed(folder: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    headers = read_local(folder)
    blocks, source = find_blocks(headers.tensors, headers.config), Source(folder, headers.tensors)
    stored = StoredWeights(headers.config, set(headers.tensors), blocks, source.read)
    return StreamedModel(stored, dtype, torch.device("cpu"))
