"""Vectors: several neighbouring inputs with one code together, of which only some combinations of magnitudes exist.

The types IQ2 and IQ3 of GGUF have them: four or eight magnitudes are one vector of a book. The books are those of the
package ``gguf``. Every value has a sign of its own, but in most of the types an even number of every eight is negative.
In IQ1 the vectors have the signs, and one or several of them are moved to one side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantcore.formats.tables import kept

if TYPE_CHECKING:
    import torch

    from quantcore.formats import Format

SIGNS = 8  # values whose signs are stored together
SCORES_AT_ONCE = 1 << 22  # of values with vectors: 16 MB


@dataclass(frozen=True)
class VectorBook:
    """The vectors of the type ``name`` of GGUF: ``size`` magnitudes each, in units of ``unit`` in the book's numbers.

    ``even_signs``: of every eight values an even number is negative. If there is a ``shift``, the vectors of the book
    have signs, and it is added to all values of ``num_shifted`` neighbouring inputs, or taken from all of them.
    """

    name: str
    size: int
    unit: int
    even_signs: bool = False
    shift: float = 0.0
    num_shifted: int = 0

    @property
    def num_inputs(self) -> int:
        """The number of neighbouring inputs that must be rounded together."""
        return self.num_shifted or (SIGNS if self.even_signs else self.size)

    def magnitudes(self, device: torch.device) -> torch.Tensor:
        """Return all vectors, float32 [vectors, size], before they are moved."""
        return kept(_magnitudes, self, device)

    def snap_(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Move values (float32, any shape) to the nearest vectors along ``axis``, in place.

        If the number of negative values must become even, the value nearest to zero gets the other sign.
        """
        import torch

        rows = x.movedim(axis, -1)
        values_N = rows.reshape(-1, self.num_inputs).nan_to_num()
        book = self.magnitudes(x.device)
        twice, squares = 2 * book.T, book.square().sum(1)
        step = max(1, SCORES_AT_ONCE // len(book) // (self.num_inputs // self.size))
        for start in range(0, len(values_N), step):
            part = values_N[start : start + step]
            if self.shift:
                part.copy_(self._nearest_shifted(part, book))
                continue
            magnitude, is_negative = part.abs(), part < 0
            if self.even_signs:
                is_odd = is_negative.sum(1, keepdim=True) % 2 == 1
                flips = torch.zeros_like(is_negative).scatter_(1, magnitude.argmin(1, keepdim=True), is_odd)
                magnitude, is_negative = torch.where(flips, -magnitude, magnitude), is_negative ^ flips
            scores = (magnitude.reshape(-1, self.size) @ twice).sub_(squares)
            nearest = book[scores.argmax(1)].reshape(part.shape)
            part.copy_(torch.where(is_negative, -nearest, nearest))
        return x.copy_(values_N.reshape(rows.shape).movedim(-1, axis))

    def _nearest_shifted(self, part: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
        """Return the nearest vectors to values [N, num_inputs], all of a row moved to the side that is nearer."""
        import torch

        sides, scores = [], []
        for vectors in (book + self.shift, book - self.shift):
            score, index = torch.addmm(-vectors.square().sum(1), part.reshape(-1, self.size), 2 * vectors.T).max(1)
            sides.append(vectors[index].reshape(part.shape))
            scores.append(score.reshape(len(part), -1).sum(1, keepdim=True))
        return torch.where(scores[1] > scores[0], sides[1], sides[0])


def snap_(fmt: Format, x: torch.Tensor, axis: int) -> torch.Tensor:
    """Move scaled values to the nearest vectors of the format along ``axis``, in place; nothing if it has none."""
    return x if fmt.vectors is None else fmt.vectors.snap_(x, axis)


def num_inputs(fmt: Format) -> int:
    """Return the number of neighbouring inputs that the format rounds together."""
    return 1 if fmt.vectors is None else fmt.vectors.num_inputs


def _magnitudes(book: VectorBook, device: torch.device) -> torch.Tensor:
    import torch
    from gguf import quants

    kind = getattr(quants, book.name)
    kind.init_grid()
    return torch.from_numpy(kind.grid.reshape(-1, book.size).copy()).float().div_(book.unit).to(device)
