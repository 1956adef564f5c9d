"""Statistics of one input tensor: plain values, without the hooks that gathered them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class Needs:
    """The fields of ``Stats`` that an algorithm needs beyond those that are always set; ``|`` unites them.

    ``sample``: the number of tokens. ``shift`` makes calibration run the model with and without quantized layers,
    ``outputs`` makes it go through the float model backward as well.
    """

    gram: bool = False
    float64: bool = False
    sample: int = 0
    shift: bool = False
    outputs: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.gram or other.gram,
            self.float64 or other.float64,
            max(self.sample, other.sample),
            self.shift or other.shift,
            self.outputs or other.outputs,
        )


@dataclass(frozen=True)
class Stats:
    """Statistics of all tokens x [I] that one or several layers read; these layers share one object.

    ``gram_II`` is the mean of x x^T in float32 or float64 (half of GPTQ's Hessian), ``mean_I`` and ``mean_abs_I`` those
    of x and |x|, ``largest_I`` the largest |x|; the last three float32. ``sample_TI`` are some of the tokens as they
    were, spread evenly over the text. ``shift_II`` is the mean of (y - x) x^T, for methods that compare x behind
    quantized layers with the input y of the float model. None: not requested. In ``gram_II`` and ``shift_II`` tokens
    may be weighted (``collector.token_weights``). Of several ranks only the ``owner`` has these two matrices; the
    others have ``diagonal_I``, that of ``gram_II``, and the rest. ``num_lent`` of the tokens were lent to an expert
    (``expert_token_topup``). ``outputs``, on the owner, has the second moments of the gradients of log p(y) by the
    outputs of each layer, by its name: matrices [o, o] for consecutive ``workload.output_blocks`` of its rows.
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
    outputs: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @classmethod
    def of_mean_squares(cls, mean_square_I: torch.Tensor, num_tokens: int, owner: int = 0) -> Stats:
        """Return statistics of which only the mean squares [I] are known; all others are empty."""
        nothing = mean_square_I.new_empty(0)
        return cls(num_tokens, nothing, nothing, nothing, diagonal_I=mean_square_I, owner=owner)

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
        return replace(self, gram_II=None, shift_II=None, diagonal_I=diagonal_I, outputs={})

    def for_layers(self, names: Mapping[str, str]) -> Stats:
        """Return the statistics with other ``names`` of the layers."""
        if not self.outputs:
            return self
        return replace(self, outputs={names[old]: grams for old, grams in self.outputs.items() if old in names})

    def with_outputs_divided(self, layer: str, rows_F: torch.Tensor, scale_F: torch.Tensor) -> Stats:
        """Return the statistics for a layer some of whose outputs, ``rows_F``, are divided by ``scale_F``."""
        grams = self.outputs[layer]
        factor_O = torch.ones(sum(map(len, grams)), device=scale_F.device)
        factor_O[rows_F.to(scale_F.device)] = scale_F.float()
        factors = torch.split(factor_O, [len(gram) for gram in grams])
        scaled = (gram * factor[:, None] * factor for gram, factor in zip(grams, factors, strict=True))
        return replace(self, outputs=dict(self.outputs) | {layer: tuple(scaled)})

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
