"""A model folder as a streamed model."""

from pathlib import Path

import torch

from quantcore.checkpoint.blocks import find_blocks
from quantcore.checkpoint.headers import read_local
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.tensors.source import Source


def streamed(folder: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    headers = read_local(folder)
    blocks, source = find_blocks(headers.tensors, headers.config), Source(folder, headers.tensors)
    return StreamedModel(headers.config, source.read, set(headers.tensors), blocks, dtype, torch.device("cpu"))
