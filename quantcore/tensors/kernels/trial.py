"""The smallest kernel, which shows whether Triton can compile one for a device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def doubled(number: float, device: torch.device) -> float:
    """Return twice the ``number``, computed by a kernel."""
    x = torch.tensor([number], device=device)
    _double[(1,)](x)
    return x.item()


@triton.jit
def _double(x):
    tl.store(x, 2.0 * tl.load(x))
