"""Build a model whose parameters use no memory, not even for a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

LARGE_ELEMENTS = 1 << 24
"""A tensor with more elements is usually a parameter: computed buffers (RoPE tables, masks) are smaller."""

Built = TypeVar("Built", bound=nn.Module)

FACTORIES = frozenset((torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.empty))


def build_empty(build: Callable[[], Built], *, include_buffers: bool = False) -> Built:
    """Return what ``build`` makes, with every parameter on the meta device, and with ``include_buffers`` every buffer.

    Accelerate moves a parameter there once it exists, so that one layer of experts made by ``torch.zeros`` takes its
    full size first: 3 GB and a minute of CPU time for Llama 4. Here, large tensors begin on the meta device.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=include_buffers), no_init_weights():
        with _LargeOnMeta():
            model = build()
        if include_buffers or not any(buffer.is_meta for buffer in model.buffers()):
            return model
        return build()  # a buffer is that large too, such as the mask of a long context


class _LargeOnMeta(TorchFunctionMode):
    """Make tensors of more than ``LARGE_ELEMENTS`` elements on the meta device, unless the caller names a device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") is None:
            shape_only = func(*args, **kwargs | {"device": "meta"})
            if shape_only.numel() > LARGE_ELEMENTS:
                return shape_only
        return func(*args, **kwargs)
