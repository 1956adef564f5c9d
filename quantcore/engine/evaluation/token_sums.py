"""Sums over a vocabulary from which losses, divergence and agreement of tokens follow, part by part.

The log-sum-exp of all logits comes from those of parts and their largest logit (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv:1805.02867). Squared differences from a mean are joined as in Chan, Golub and
LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979). Within a part sums are
float32; parts are joined in float64, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantcore.plan.workload import CACHED_TILE_BYTES, TILE_BYTES


@dataclass(frozen=True)
class Softmax:
    """Sums of one model, for each token [T]: the ``largest`` logit, its number as the ``choice``, the sum of exp(logit
    - largest), and the logit of the ``target`` (0 where the target is in another part).
    """

    largest: torch.Tensor
    choice: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor

    def joined(self, other: Softmax) -> Softmax:
        """Return the sums of both parts; of two equal logits the first is the choice."""
        largest = torch.maximum(self.largest, other.largest)
        choice = torch.where(other.largest > self.largest, other.choice, self.choice)
        totals = (part.total * (part.largest - largest).exp() for part in (self, other))
        return Softmax(largest, choice, sum(totals, torch.zeros_like(largest)), self.target + other.target)

    @property
    def log_total(self) -> torch.Tensor:
        return self.total.log() + self.largest


@dataclass(frozen=True)
class Spread:
    """The number of values, their mean and their squared differences from it, for each token [T]."""

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    def joined(self, other: Spread) -> Spread:
        count, step = self.count + other.count, other.mean - self.mean
        squares = self.squares + other.squares + step.square() * self.count * other.count / count
        return Spread(count, self.mean + step * other.count / count, squares)


@dataclass(frozen=True)
class TokenSums:
    """Sums of one model, or of the original and another one, for each token [T], float64 on the CPU.

    ``values``: the spread of the original's logits; ``changes``: that of the differences of the other's logits from
    them; ``moved``: the sum of these differences, weighted with exp(logit - largest) of the original.
    """

    models: tuple[Softmax, ...]
    values: Spread | None = None
    changes: Spread | None = None
    moved: torch.Tensor | None = None

    def joined(self, other: TokenSums) -> TokenSums:
        """Return the sums of the same tokens over two parts of the vocabulary, of which ``other`` is the later one."""
        models = tuple(mine.joined(its) for mine, its in zip(self.models, other.models, strict=True))
        if self.values is None or self.changes is None or self.moved is None:
            return TokenSums(models)
        assert other.values is not None and other.changes is not None and other.moved is not None
        largest = models[0].largest
        moved = sum(
            part.moved * (part.models[0].largest - largest).exp() for part in (self, other) if part.moved is not None
        )
        assert isinstance(moved, torch.Tensor)
        return TokenSums(models, self.values.joined(other.values), self.changes.joined(other.changes), moved)

    def losses(self) -> list[torch.Tensor]:
        """Return -log p (natural) of the targets [T], float32, of each model."""
        return [(model.log_total - model.target).float() for model in self.models]

    def distances(self) -> torch.Tensor:
        """Return four distances of the other model from the original, [T, 4].

        They are KL(original || other) in nats, 1 for the same first choice, the sum of squared differences of the
        logits, and the sum of squares of the original's logits. Both sums are without the mean over the vocabulary, on
        which no probability depends.
        """
        original, other = self.models
        assert self.values is not None and self.changes is not None and self.moved is not None
        kl = (other.log_total - original.log_total - self.moved / original.total).clamp(min=0)
        agrees = (original.choice == other.choice).double()
        return torch.stack([kl, agrees, self.changes.squares, self.values.squares], -1)


def sums_of_tokens(outputs: Sequence[torch.Tensor], targets_T: torch.Tensor, first: int) -> TokenSums:
    """Return the sums over a part of the vocabulary, which begins with the token ``first``.

    ``outputs`` are the logits [T, v] of one model, or of the original and of another one.
    """
    num_rows, size = outputs[0].shape
    num_bytes = CACHED_TILE_BYTES if outputs[0].device.type == "cpu" else TILE_BYTES
    step = max(1, num_bytes // (4 * size))
    targets_T = targets_T.to(outputs[0].device) - first
    tiles = []
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        tile = torch.stack(_sums_of_tile([_copied(logits_TV[rows]) for logits_TV in outputs], targets_T[rows]))
        tiles.append(tile.cpu())  # at once: each copy from an accelerator waits for it
    numbers = iter(torch.cat(tiles, 1).double())
    models = tuple(
        Softmax(next(numbers), next(numbers) + first, next(numbers), next(numbers)) for _ in range(len(outputs))
    )
    if len(models) == 1:
        return TokenSums(models)
    mean, squares, mean_change, squared_changes, moved = numbers
    count = torch.full_like(mean, size)
    moved = moved + mean_change * models[0].total
    return TokenSums(models, Spread(count, mean, squares), Spread(count, mean_change, squared_changes), moved)


def _sums_of_tile(logits: list[torch.Tensor], targets_T: torch.Tensor) -> list[torch.Tensor]:
    """Return the four sums of each model, then five of both, each [T], float32.

    The last one is the sum of the differences less their mean, weighted as in ``TokenSums``.
    """
    is_here = (targets_T >= 0) & (targets_T < logits[0].shape[1])
    places_T1 = torch.where(is_here, targets_T, 0)[:, None]
    buffer = torch.empty_like(logits[0])  # in place, because new memory costs more than these sums
    found: list[torch.Tensor] = []
    for logits_TV in reversed(logits):  # the original's at last, which are the weights below
        largest = logits_TV.max(-1)  # argmax takes three times as long
        torch.sub(logits_TV, largest.values[:, None], out=buffer).exp_()
        target = torch.where(is_here, logits_TV.gather(1, places_T1)[:, 0], 0.0)
        found = [largest.values, largest.indices.float(), buffer.sum(-1), target, *found]
    if len(logits) == 1:
        return found
    original, other = logits
    changes = other.sub_(original)
    mean_change = changes.mean(-1)
    changes.sub_(mean_change[:, None])
    moved = buffer.mul_(changes).sum(-1)
    squared_changes = changes.square_().sum(-1)
    mean = original.mean(-1)
    squares = original.sub_(mean[:, None]).square_().sum(-1)
    return [*found, mean, squares, mean_change, squared_changes, moved]


def _copied(logits_TV: torch.Tensor) -> torch.Tensor:
    """Return a copy in float32 that may be changed."""
    return logits_TV.to(torch.float32, copy=True)
