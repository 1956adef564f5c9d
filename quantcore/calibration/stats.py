"""Statistics of one input tensor: plain values, without the hooks that gathered them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Needs:
    """The fields of ``Stats`` that an algorithm needs beyond those that are always set; ``|`` unites them.

    ``sample``: the number of tokens. ``shift`` makes calibration run the model with and without quantized layers.
    """

    gram: bool = False
    float64: bool = False
    sample: int = 0
    shift: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.gram or other.gram,
            self.float64 or other.float64,
            max(self.sample, other.sample),
            self.shift or other.shift,
        )


@dataclass(frozen=True)
class Stats:
    """Statistics of all tokens x [I] that one or several layers read; these layers share one object.

    ``gram_II`` is the mean of x x^T in float32 or float64 (half of GPTQ's Hessian), ``mean_I`` and ``mean_abs_I``
    those of x and |x|, ``largest_I`` the largest |x|; the last three float32. ``sample_TI`` are some of the tokens as
    they were, spread evenly over the text. ``shift_II`` is the mean of (y - x) x^T, for methods that compare x behind
    quantized layers with the input y of the float model. None: not requested. In ``gram_II`` and ``shift_II`` tokens
    may be weighted (``collector.token_weights``). Of several ranks only the ``owner`` has these two matrices; the
    others have ``diagonal_I``, that of ``gram_II``, and the rest. ``num_lent`` of the tokens were lent to an expert
    (``lending``).
    """

    num_tokens: int
    largest_I: torch.Tensor
    mean_I: torch.Tensor
    mean_abs_I: torch.Tensor
    gram_II: torch.Tensor | None = None
    sample_TI: torch.Tensor | None = None
    shift_II: torch.Tensor | None = None
    diagonal_I: torch.Tensor | None = None
    owner: int = 0
    num_lent: int = 0

    @property
    def num_own(self) -> int:
        """The number of tokens that the model itself sent to the layers."""
        return self.num_tokens - self.num_lent

    @property
    def hessian_diagonal_I(self) -> torch.Tensor:
        """The mean square of each input, float32 [I]: the diagonal of ``gram_II``, half of the Hessian's."""
        diagonal_I = self.diagonal_I if self.gram_II is None else self.gram_II.diagonal()
        assert diagonal_I is not None, "calibration was not asked for gram_II"
        return diagonal_I.float()

    def for_others(self) -> Stats:
        """Return the statistics as the ranks other than the ``owner`` hold them."""
        diagonal_I = None if self.gram_II is None else self.gram_II.diagonal().clone()
        return replace(self, gram_II=None, shift_II=None, diagonal_I=diagonal_I)

    def divided(self, scale_I: torch.Tensor) -> Stats:
        """Return the statistics of x / ``scale_I``; scales [I] are above 0."""
        scale = scale_I.float()
        both = scale[:, None] * scale
        return replace(
            self,
            largest_I=self.largest_I / scale,
            mean_I=self.mean_I / scale,
            mean_abs_I=self.mean_abs_I / scale,
            gram_II=None if self.gram_II is None else self.gram_II / both,
            sample_TI=None if self.sample_TI is None else (self.sample_TI / scale).to(self.sample_TI.dtype),
            shift_II=None if self.shift_II is None else self.shift_II / both,
            diagonal_I=None if self.diagonal_I is None else self.diagonal_I / (scale * scale),
        )
