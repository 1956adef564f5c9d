"""Sums over the windows of a text, with the same bits for any number of ranks that share the windows.

The text is cut into chunks, a power of two of them. A chunk's windows are added one after the other, then the sums of
two neighbouring chunks, then those of two such pairs, and so on. A rank has whole chunks, and ranks exchange nodes of
that tree, so that the same numbers are added in the same order everywhere.

Legend: T tokens, I inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Generic, Protocol, TypeVar

import torch

from quantcore.engine.calibration.stats import Needs, Stats
from quantcore.engine.runtime.matmul import add_product, adds_narrow_products, tensor_cores
from quantcore.engine.runtime.ranks import ALONE, Ranks
from quantcore.plan.workload import count_chunks, output_blocks

NUM_PANELS = 4  # of a gram matrix, of which the upper triangle is never computed: 10/16 of the work


@dataclass(frozen=True)
class Span:
    """The division of ``num_windows`` windows of a text into chunks, and of the chunks among the ``ranks``."""

    num_windows: int
    ranks: Ranks = ALONE

    @property
    def num_chunks(self) -> int:
        return count_chunks(self.num_windows)

    @property
    def chunks(self) -> range:
        """The chunks of this rank."""
        return self.ranks.part(self.num_chunks)

    @property
    def windows(self) -> range:
        """The windows of this rank."""
        return range(self.first_window(self.chunks.start), self.first_window(self.chunks.stop))

    def first_window(self, chunk: int) -> int:
        """Return the number of a chunk's first window, counted over the whole text."""
        return -(-chunk * self.num_windows // self.num_chunks)

    def chunk_of(self, window: int) -> int:
        """Return the chunk of a window, whose number is counted over the whole text."""
        return min(window * self.num_chunks // max(1, self.num_windows), self.num_chunks - 1)


class Mergeable(Protocol):
    """Sums over some windows."""

    def merge(self, later: Any, /) -> None:
        """Take in the sums of later windows."""


S = TypeVar("S", bound=Mergeable)


@dataclass(frozen=True)
class Node(Generic[S]):
    """The sums of 2^level neighbouring chunks, by input; ``index`` counts the nodes of its level."""

    level: int
    index: int
    sums: dict[str, S]

    def taken(self, names: Collection[str]) -> Node[S]:
        """Split these inputs off as a separate node."""
        return Node(self.level, self.index, {name: self.sums.pop(name) for name in names if name in self.sums})

    def is_left_of(self, other: Node[S]) -> bool:
        """Return whether the two are the halves of one node."""
        return self.level == other.level and self.index % 2 == 0 and self.index + 1 == other.index

    def merged(self, other: Node[S]) -> Node[S]:
        """Merge this node with its right neighbour; the result takes the memory of both."""
        for name, sums in other.sums.items():
            if name in self.sums:
                self.sums[name].merge(sums)
            else:
                self.sums[name] = sums
        return Node(self.level + 1, self.index // 2, self.sums)


@dataclass
class Tree(Generic[S]):
    """Tree whose nodes are added from left to right; two halves are merged as soon as both are present."""

    nodes: list[Node[S]] = field(default_factory=list)

    def add(self, node: Node[S]) -> None:
        while self.nodes and self.nodes[-1].is_left_of(node):
            node = self.nodes.pop().merged(node)
        self.nodes.append(node)


def root_at(owner: int, nodes: Sequence[Node[S]], span: Span) -> Node[S] | None:
    """Return the root of the tree on the rank ``owner``; None on the others. ``nodes`` are those of this rank's chunks.

    Two halves on different ranks are merged on one of these ranks, on the owner if it is one of them. So a rank holds
    its own nodes and one that it receives. All ranks call it.
    """
    ranks = span.ranks
    own = {(node.level, node.index): node for node in nodes}
    holders = [rank for rank in range(ranks.size) for _ in ranks.part(span.num_chunks, rank)]
    for level in range(span.num_chunks.bit_length() - 1):
        pairs = list(zip(holders[::2], holders[1::2], strict=True))
        holders = [owner if owner in pair else pair[0] for pair in pairs]
        for index, ((left, right), to) in enumerate(zip(pairs, holders, strict=True)):
            halves = (level, 2 * index), (level, 2 * index + 1)
            for half, holder in zip(halves, (left, right), strict=True):
                ranks.move(own, half, holder, to)
            if ranks.rank == to and halves[0] in own:  # else it merged them as they came
                own[level + 1, index] = own.pop(halves[0]).merged(own.pop(halves[1]))
    root = (span.num_chunks.bit_length() - 1, 0)
    ranks.move(own, root, holders[0], owner)
    return own.get(root)


class Sums:
    """Running sums over the tokens of one input, in float32 or float64.

    A GPU multiplies inputs of bfloat16 as such. Those that are weighted or subtracted are rounded to bfloat16 again,
    which adds no more noise than they came with; x^T x stays the square of one matrix, so it has no negative
    eigenvalues.
    """

    def __init__(self, num_inputs: int, needs: Needs, device: torch.device, first_window: int = 0) -> None:
        self._needs = needs
        self._first_window = first_window
        dtype = torch.float64 if needs.float64 else torch.float32
        self.num_tokens = self._num_lent = 0
        self._largest = torch.zeros(num_inputs, device=device)
        self._sum = torch.zeros(num_inputs, dtype=torch.float64, device=device)
        self._sum_abs = torch.zeros(num_inputs, dtype=torch.float64, device=device)
        self._gram = torch.zeros(num_inputs, num_inputs, dtype=dtype, device=device) if needs.gram else None
        self._shift = torch.zeros(num_inputs, num_inputs, dtype=dtype, device=device) if needs.shift else None
        self._num_shifted = 0
        self._samples: list[torch.Tensor] = []
        self._outputs: dict[str, list[torch.Tensor]] = {}

    def add(
        self,
        x_TI: torch.Tensor,
        reference_TI: torch.Tensor | None,
        weight_T: torch.Tensor | None,
        num_sampled: int,
        num_windows: int,
        *,
        is_lent: bool = False,
    ) -> None:
        """Take in one of about ``num_windows`` sequences, and keep ``num_sampled`` of its tokens."""
        num_tokens = len(x_TI)
        self.num_tokens += num_tokens
        self._num_lent += num_tokens * is_lent
        if num_sampled:
            step = max(1, num_tokens // num_sampled)
            # Not always from 0: the first token of a text is often like no other.
            first = (self._first_window + len(self._samples)) * step // num_windows % step
            self._samples.append(x_TI[first::step][:num_sampled].clone())
        wide = x_TI.to(torch.float64 if self._needs.float64 else torch.float32)
        self._sum += wide.sum(0)
        magnitude = wide.abs()
        self._sum_abs += magnitude.sum(0)
        self._largest = torch.maximum(self._largest, magnitude.amax(0).float())
        weight_T1 = None if weight_T is None else weight_T.to(wide.dtype).unsqueeze(1)
        is_narrow = x_TI.dtype == torch.bfloat16 and not self._needs.float64 and adds_narrow_products(x_TI.device)
        operand = x_TI.dtype if is_narrow else wide.dtype
        with tensor_cores(x_TI.device, x_TI.dtype):
            if self._gram is not None:
                _add_gram(self._gram, (wide if weight_T1 is None else wide * weight_T1.sqrt()).to(operand))
            if self._shift is not None and reference_TI is not None:
                moved = reference_TI.to(wide.dtype) - wide
                weighted = wide if weight_T1 is None else wide * weight_T1
                add_product(self._shift, moved.T.to(operand), weighted.to(operand))
                self._num_shifted += num_tokens

    def add_gradients(self, layer: str, gradient_TO: torch.Tensor) -> None:
        """Take in the gradients of log p(y) by the outputs of a layer that reads the input, for one sequence."""
        blocks = output_blocks(gradient_TO.shape[1])
        grams = self._outputs.setdefault(
            layer, [gradient_TO.new_zeros(rows.stop - rows.start, rows.stop - rows.start) for rows in blocks]
        )
        with tensor_cores(gradient_TO.device, gradient_TO.dtype):
            for gram, rows in zip(grams, blocks, strict=True):
                _add_gram(gram, gradient_TO[:, rows])

    @property
    def num_inputs(self) -> int:
        return len(self._largest)

    def merge(self, later: Sums) -> None:
        """Take in the sums of later windows."""
        self.num_tokens += later.num_tokens
        self._num_lent += later._num_lent
        self._num_shifted += later._num_shifted
        self._largest = torch.maximum(self._largest, later._largest)
        self._sum += later._sum
        self._sum_abs += later._sum_abs
        for own, other in ((self._gram, later._gram), (self._shift, later._shift)):
            if own is not None and other is not None:
                own += other
        for layer, grams in later._outputs.items():
            mine = self._outputs.setdefault(layer, grams)
            if mine is not grams:
                for gram, other in zip(mine, grams, strict=True):
                    gram += other
        self._samples += later._samples

    def stats(self, owner: int = 0) -> Stats:
        """Return the statistics on the ``owner``, which is this rank. The sums are used up."""
        sample = torch.cat(self._samples)[: self._needs.sample] if self._samples else None
        return Stats(
            num_tokens=self.num_tokens,
            largest_I=self._largest,
            mean_I=(self._sum / self.num_tokens).float(),
            mean_abs_I=(self._sum_abs / self.num_tokens).float(),
            gram_II=None if self._gram is None else _whole(self._gram).div_(self.num_tokens),
            sample_TI=sample,
            shift_II=self._shift / self._num_shifted if self._shift is not None and self._num_shifted else None,
            owner=owner,
            num_lent=self._num_lent,
            outputs={layer: tuple(map(_whole, grams)) for layer, grams in self._outputs.items()},
        )


def _add_gram(gram_II: torch.Tensor, x_TI: torch.Tensor) -> None:
    """Add x^T x, of which only the blocks on and below the diagonal are computed."""
    width = ceil(len(gram_II) / NUM_PANELS)
    for start in range(0, len(gram_II), width):
        end = start + width
        add_product(gram_II[start:end, :end], x_TI[:, start:end].T, x_TI[:, :end])


def _whole(lower_II: torch.Tensor) -> torch.Tensor:
    """Return the symmetric matrix whose lower triangle is given; overwrites the rest of it."""
    return lower_II.tril_().add_(lower_II.tril(-1).T)
