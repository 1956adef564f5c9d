"""The base class of observers: it tracks the exact range of all values under every scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch

from quantcore.config.grouping import Grouping, weight_grouping
from quantcore.config.spec import OBSERVERS_GROUP, QSchemeType, QuantizationSpec
from quantcore.errors import ConfigError
from quantcore.registry import Registry
from quantcore.tensors.affine import min_max


def _check(name: str, entry: object) -> None:
    """Raise ValueError unless ``entry`` is a class of observers."""
    if not (isinstance(entry, type) and issubclass(entry, Observer)):
        raise ValueError("it is not a subclass of quantcore.engine.observers.Observer")


OBSERVERS: Registry[type[Observer]] = Registry("observer", "quantcore.engine.observers", OBSERVERS_GROUP, check=_check)


def observer_for(spec: QuantizationSpec, grouping: Grouping | None = None) -> Observer:
    """Return the observer of ``spec``. ``grouping`` defines which values share a scale; by default a weight's."""
    return OBSERVERS.get(spec.observer_method)(spec, grouping)


class Observer(ABC):
    """Learns the range of a tensor [R, G, S] from batches; the result depends only on the values seen.

    The order, the number of pieces and the number of ranks do not change a single bit. Batches may differ in shape as
    long as the same R rows of G groups share scales. A group that saw NaN has the range NaN, one that saw an infinity
    has it as an end. The state is plain tensors: an observer can be pickled, sent to another rank and merged there.
    """

    qscheme: ClassVar[QSchemeType | None] = None
    """The only scheme that the class serves; None for any."""

    def __init__(self, spec: QuantizationSpec, grouping: Grouping | None = None) -> None:
        if self.qscheme not in (None, spec.qscheme):
            raise ConfigError(
                f"{type(self).__name__} does not support the qscheme {spec.qscheme.value}.",
                code="observer_scheme",
                hint="Use the observer named after the scheme.",
                field="/observer_cls",
                allowed=[str(spec.observer_cls)],
            )
        self.spec = spec
        self.grouping = weight_grouping(spec) if grouping is None else grouping
        self.num_values = 0
        self._range_2RG: torch.Tensor | None = None  # [minimum, -maximum], so that one minimum merges both

    def update(self, x: torch.Tensor) -> None:
        """Process a batch of any shape that the grouping can split; an empty one changes nothing."""
        if x.numel() == 0:
            return
        x = x.detach() if self._range_2RG is None else x.detach().to(self._range_2RG.device)
        self._add(self.grouping.split(x))
        self.num_values += x.numel()

    def merge(self, other: Self) -> None:
        """Add all values seen by ``other``, an observer of the same class for the same spec and grouping."""
        if (type(self), self.spec, self.grouping) != (type(other), other.spec, other.grouping):
            raise ValueError("only observers of the same class, spec and grouping can be merged")
        if other._range_2RG is not None:
            self._merge(other)
            self.num_values += other.num_values

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (minimum, maximum), float32 [R, G], for ``affine.find_params``.

        Raises ValueError if nothing was seen yet.
        """
        if self._range_2RG is None:
            raise ValueError("the observer has seen no values")
        return self._find(self._range_2RG[0], -self._range_2RG[1])

    @abstractmethod
    def _find(self, minimum_RG: torch.Tensor, maximum_RG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range to quantize, given the smallest and largest value seen."""

    def _add(self, x_RGS: torch.Tensor) -> None:
        """Record the data of a batch that ``_find`` needs."""
        minimum, maximum = min_max(x_RGS)
        self._widen(torch.stack([minimum, -maximum]).float())

    def _merge(self, other: Self) -> None:
        """Record the data that ``_find`` needs from an observer that has seen values."""
        assert other._range_2RG is not None
        self._widen(other._range_2RG)

    def _widen(self, range_2RG: torch.Tensor) -> None:
        if self._range_2RG is None:
            self._range_2RG = range_2RG
        elif range_2RG.shape != self._range_2RG.shape:
            (rows, groups), (new_rows, new_groups) = self._range_2RG.shape[1:], range_2RG.shape[1:]
            raise ValueError(
                f"this batch has {new_rows} x {new_groups} scales (rows x groups), but earlier ones had {rows} x "
                f"{groups}; an observer needs a fixed number of scales"
            )
        else:
            self._range_2RG = torch.minimum(self._range_2RG, range_2RG.to(self._range_2RG.device))
