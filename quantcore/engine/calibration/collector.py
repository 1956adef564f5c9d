"""Gathers statistics of the inputs of layers with hooks, while a block runs.

Legend: T tokens, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from weakref import ReferenceType, ref

import torch
from torch import nn

from quantcore.engine.calibration.expert_token_topup import are_lent
from quantcore.engine.calibration.reduction import Node, Span, Sums, Tree, root_at
from quantcore.engine.calibration.stats import Needs, Stats
from quantcore.engine.model.experts import routed_tokens
from quantcore.engine.runtime.ranks import spread
from quantcore.engine.runtime.shards import counts

Places = tuple[torch.Tensor, torch.Tensor]
"""The places of the same tokens in two lists: in the quantized model's, and in the float model's."""


class StatsCollector:
    """Watches the inputs of modules. Modules that read the same tensor share one set of sums, found as they run.

    Every sequence is added by itself, in the order of the text (see ``reduction``), so that neither the batch size nor
    the number of ranks changes a bit.
    """

    def __init__(self, modules: Mapping[str, nn.Module], needs: Needs, span: Span) -> None:
        self.modules = modules
        self._needs = needs
        self._span = span
        self._num_windows = max(1, span.num_windows)
        self._sample_a_window = ceil(needs.sample / self._num_windows)
        self._same_as: dict[str, str] = {}  # module -> the first that reads the same tensor, in the order of the run
        self._open: dict[int, dict[str, Sums]] = {}  # sums of chunks that may get more windows
        self._tree = Tree[Sums]()
        self._next_chunk = span.chunks.start
        self._window = self._next_window = span.windows.start
        self._seen: dict[int, tuple[ReferenceType[torch.Tensor], str]] = {}
        self._reference: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}  # inputs, and routed_tokens
        self._is_reference = False
        self._gradients: dict[str, torch.Tensor] = {}  # by the outputs of the float model's layers
        self._squares: dict[str, torch.Tensor] = {}  # sums of their squares over all layers that read the same input
        self._weights: torch.Tensor | None = None
        self._num_begun: int | None = None  # windows that run together

    def begin(self, state: torch.Tensor) -> None:
        """Announce the next windows, [N, T, H] in front of the block, which give the ``token_weights``."""
        self._weights, self._num_begun = token_weights(state), len(state)
        self._window = self._next_window
        self._next_window += len(state)
        self._close(self._span.chunk_of(self._window))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the hooks on the modules while this lasts."""
        handles = [module.register_forward_pre_hook(self._hook(name)) for name, module in self.modules.items()]
        try:
            yield
        finally:
            self._seen.clear()
            for handle in handles:
                handle.remove()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Take inputs as those of the float model, the ``y`` of ``Stats.shift_II``, while this lasts."""
        self._reference.clear()
        self._gradients.clear()
        self._squares.clear()
        self._is_reference = True
        try:
            yield
        finally:
            self._is_reference = False

    def learn(self, calls: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        """Take (name, inputs, gradients) of modules that ran as ``reference``: those of log p(y) by outputs [.., T, O].

        The tokens of the same windows, run next, are then weighted by the squares of these gradients.
        """
        shared: dict[int, torch.Tensor] = {}
        for name, inputs, gradient in calls:
            self._gradients[name] = gradient.float()
            square = self._gradients[name].square().sum(-1)
            shared[id(inputs)] = shared[id(inputs)] + square if id(inputs) in shared else square
        self._squares = {name: shared[id(inputs)] for name, inputs, _ in calls}

    def stats(self, owner: int | None = None) -> dict[str, Stats]:
        """Return the statistics of every module that saw a token, in the order in which they first ran.

        All ranks call it. The owner of an input merges its matrices and keeps them. Inputs are divided among the ranks
        by the cost of solving their layers, or all belong to ``owner``.
        """
        ranks, nodes = self._span.ranks, self._nodes()
        same_as: dict[str, str] = {}
        widths: dict[str, int] = {}
        for aliases, more_widths in ranks.gather((self._same_as, _widths(nodes))):
            same_as |= {name: first for name, first in aliases.items() if name not in same_as}
            widths |= more_widths
        owners = self._owners(same_as, widths) if owner is None else dict.fromkeys(widths, owner)
        made: dict[str, Stats] = {}
        for rank in range(ranks.size):
            names = [name for name in widths if owners[name] == rank]
            root = root_at(rank, [node.taken(names) for node in nodes], self._span)
            if root is not None:
                made = {name: sums.stats(rank) for name, sums in root.sums.items()}
        for part in ranks.gather({name: stats.for_others() for name, stats in made.items()}):
            made = part | made
        return {name: made[first] for name, first in same_as.items()}

    def _owners(self, same_as: Mapping[str, str], widths: Mapping[str, int]) -> dict[str, int]:
        """Return the rank of each input: its matrix is factored once, its layers' weights are multiplied with it."""
        num_weights = dict.fromkeys(widths, 0)
        for name, first in same_as.items():
            num_weights[first] += self.modules[name].get_parameter("weight").numel()
        costs = [width**3 + width * num_weights[name] for name, width in widths.items()]
        return dict(zip(widths, spread(costs, self._span.ranks.size), strict=True))

    def _hook(self, name: str):  # type: ignore[no-untyped-def]  # a hook
        def see(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if not counts(inputs[0]):
                return
            if self._is_reference:
                self._reference[name] = inputs[0].detach(), routed_tokens()
            else:
                self._add(name, inputs[0])

        return see

    def _add(self, name: str, x: torch.Tensor) -> None:
        if id(x) in self._seen and self._seen[id(x)][0]() is x:  # another module read it, too
            self._add_gradients(self._same_as.setdefault(name, self._seen[id(x)][1]), name, x)
            return
        first = self._same_as.setdefault(name, name)
        places = None if are_lent() else self._places(name)
        reference = None if are_lent() else self._reference_of(name, x, places)
        num = self._num_begun if x.ndim > 2 else None
        sequences = x.reshape(-1, *x.shape[-2:]) if num is None else x.reshape(num, -1, x.shape[-1])
        references: list[torch.Tensor | None] = [None] * len(sequences)
        if reference is not None:
            references = list(reference.reshape_as(sequences))
        weights: list[torch.Tensor | None] = [None] * len(sequences)
        weight = None if are_lent() else self._weights_of(name, x, places)
        if weight is not None:
            weights = list(weight.reshape(sequences.shape[:-1]))
        for number, (sequence, other, weight_T) in enumerate(zip(sequences, references, weights, strict=True)):
            sums = self._sums_of(self._window + number, first, x)
            sums.add(sequence, other, weight_T, self._sample_a_window, self._num_windows, is_lent=are_lent())
        self._seen[id(x)] = (ref(x), first)
        self._add_gradients(first, name, x)

    def _add_gradients(self, first: str, name: str, x: torch.Tensor) -> None:
        """Add the gradients of a module that reads ``x``, whose sums are those of ``first``."""
        gradient = None if are_lent() else self._gradients.pop(name, None)
        if gradient is None:
            return
        num = self._num_begun if gradient.ndim > 2 and self._num_begun else 1
        for number, gradient_TO in enumerate(gradient.reshape(num, -1, gradient.shape[-1])):
            self._sums_of(self._window + number, first, x).add_gradients(name, gradient_TO)

    def _weights_of(self, name: str, x: torch.Tensor, places: Places | None) -> torch.Tensor | None:
        """Return the weight of each token [.., T] of ``x`` with mean 1, None for equal ones."""
        if name not in self._squares:
            is_whole = self._weights is not None and self._weights.shape == x.shape[:-1]
            return self._weights if is_whole else None  # an expert gets some of the tokens
        squares = self._squares[name]
        if places is not None:
            mine, theirs = places
            matched = squares.mean().repeat(len(x))
            matched[mine] = squares[theirs]
            return with_mean_1(matched)
        return with_mean_1(squares) if squares.shape == x.shape[:-1] else None

    def _reference_of(self, name: str, x: torch.Tensor, places: Places | None) -> torch.Tensor | None:
        """Return what the float model has in place of ``x``, token by token; None if its layer saw nothing alike.

        A router may send other tokens to an expert than in the float model. Those have no counterpart: they stand for
        themselves, so that nothing is corrected for them.
        """
        reference, _ = self._reference.get(name, (None, None))
        if reference is None or places is None:
            return reference if reference is not None and reference.shape == x.shape else None
        matched = x.clone()
        mine, theirs = places
        matched[mine] = reference[theirs]
        return matched

    def _places(self, name: str) -> Places | None:
        """Return the places of the tokens that a router sends to an expert both here and in the float model."""
        _, their_tokens = self._reference.get(name, (None, None))
        tokens = routed_tokens()
        if tokens is None or their_tokens is None:
            return None
        mine, theirs = torch.where(tokens[:, None] == their_tokens)
        return mine, theirs

    def _sums_of(self, window: int, name: str, x: torch.Tensor) -> Sums:
        chunk = self._span.chunk_of(window)
        sums = self._open.setdefault(chunk, {})
        if name not in sums:
            sums[name] = Sums(x.shape[-1], self._needs, x.device, self._span.first_window(chunk))
        return sums[name]

    def _nodes(self) -> list[Node[Sums]]:
        """Return the nodes of this rank's chunks."""
        self._close(self._span.chunks.stop)
        return self._tree.nodes

    def _close(self, chunk: int) -> None:
        """Close all chunks before ``chunk``, which will get no more windows."""
        for index in range(self._next_chunk, chunk):
            self._tree.add(Node(0, index, self._open.pop(index, {})))
        self._next_chunk = max(self._next_chunk, chunk)


def _widths(nodes: Sequence[Node[Sums]]) -> dict[str, int]:
    return {name: sums.num_inputs for node in nodes for name, sums in node.sums.items()}


def token_weights(state: torch.Tensor) -> torch.Tensor:
    """Return the weight of each token [.., T] of hidden states [.., T, H]: its norm, with mean 1 over a window.

    All tokens attend to those with a much larger norm, above all to the first of a text (attention sinks, Xiao et al.
    2023; massive activations, Sun et al. 2024), so an error in one of these is an error in all. Unequal weights are the
    idea of RSQ (Sung et al. 2025), which weights tokens by the attention that they get.
    """
    length = state.detach().float().norm(dim=-1)
    return with_mean_1(length)


def with_mean_1(weights: torch.Tensor) -> torch.Tensor:
    """Divide weights [.., T] by their mean over the tokens."""
    result: torch.Tensor = weights / weights.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return result
