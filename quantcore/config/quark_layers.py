"""Layers as AMD Quark's configs list them for transforms. Bitfoundry finds them itself, and checks what it is given."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from quantcore.config.values import STRICT, Value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScalingLayer(Value):
    """An edge as AMD Quark writes it: the scale of ``layers``' common input is folded into ``prev_op``.

    ``inp`` is the layer whose input is watched, ``module2inspect`` the module whose output error is measured.
    """

    prev_op: str
    layers: tuple[str, ...]
    inp: str
    module2inspect: str | None = None
    has_kwargs: bool = False
    condition: str | None = None
    help: str | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RotatedLayers(Value):
    """A passage of the residual stream as AMD Quark lists it: ``prev_modules``, then a norm, then ``next_modules``."""

    prev_modules: tuple[str, ...] = ()
    norm_module: str | None = None
    next_modules: tuple[str, ...] = ()
    target_modules: tuple[str, ...] = ()


StreamLayers = dict[Literal["first_layer", "middle_layers", "last_layer"], tuple[RotatedLayers, ...]]
