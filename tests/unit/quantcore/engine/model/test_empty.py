"""A model without its weights takes no memory for them, and has its computed buffers."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from quantcore.engine.model.empty import LARGE_ELEMENTS, build_empty
from quantcore.engine.model.skeleton import build_skeleton

ROOM = 2 << 30


@pytest.fixture
def two_gigabytes():
    """Let this process take two more GiB of address space and no more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("model_type", ["llama4", "llama4_text", "longcat_flash"])
def test_experts_of_a_large_mixture_are_never_made(two_gigabytes, model_type):
    """Llama 4 makes a layer's experts with ``torch.zeros`` (3 GB), LongCat with ``torch.empty`` (38 GB)."""
    skeleton = build_skeleton({"model_type": model_type}, torch.bfloat16)
    assert max(each.numel() for each in skeleton.parameters()) * 2 > ROOM
    assert all(each.is_meta for each in skeleton.parameters())
    assert not any(each.is_meta for each in skeleton.buffers())


def test_a_large_buffer_is_computed():
    class WithMask(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(size, size))
            self.register_buffer("mask", torch.ones((size, size), dtype=torch.bool).tril(), persistent=False)

    size = int(LARGE_ELEMENTS**0.5) + 1
    built = build_empty(WithMask)
    assert built.weight.is_meta
    assert built.mask.sum() == size * (size + 1) // 2
