"""Many small launches of one function, recorded once as a CUDA graph and then repeated by one launch.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs. A function may be recorded if it computes with its
tensors alone: it reads no value of theirs, and takes nothing from the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

import torch

from quantcore.kernels import switch

logger = logging.getLogger("quantcore")

Tensors = Sequence[torch.Tensor | None]
Function = Callable[..., Tensors]


class Graphs:
    """Records functions of tensors where kernels are used, one graph for each key and shapes; elsewhere calls them."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph] = {}
        self._may_record = True

    def run(self, key: Hashable, function: Function, given: Tensors) -> Tensors:
        """Return what ``function`` returns for the tensors ``given``. The next run may overwrite it.

        ``key`` stands for all else that decides what the function does.
        """
        first = next(tensor for tensor in given if tensor is not None)
        if not (self._may_record and first.is_cuda and switch.are_used_on(first.device)):
            return function(*given)
        shapes = tuple(None if one is None else (one.shape, one.dtype) for one in given)
        if (key, shapes) not in self._graphs:
            try:
                self._graphs[key, shapes] = _Graph(function, given)
            except RuntimeError as error:
                logger.warning("A CUDA graph cannot be recorded (%s): GPTQ is slower.", error)
                self._may_record = False
                return function(*given)
        return self._graphs[key, shapes].run(given)


class _Graph:
    def __init__(self, function: Function, given: Tensors) -> None:
        self._inputs = [None if one is None else one.clone() for one in given]
        function(*self._inputs)  # fills caches and loads kernels, which cannot be recorded
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = function(*self._inputs)

    def run(self, given: Tensors) -> Tensors:
        for kept, one in zip(self._inputs, given, strict=True):
            if kept is not None and one is not None:
                kept.copy_(one)
        self._graph.replay()
        return self._outputs
