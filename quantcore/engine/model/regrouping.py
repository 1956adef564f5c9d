"""Layers that a checkpoint stores together and Transformers builds separately, or vice versa.

GTE stores q, k and v as one matrix, which Transformers cuts into three layers; MiniMax M3 stores gate and up, which
become one layer. Layers are planned and quantized as they are stored, so the model is rebuilt to have them so, on the
meta device; what it computes stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, Concatenate, Interleave, Split

from quantcore.engine.model.parameter_names import Conversion, find_assembled, find_conversions, untie_stored

STORED = "stored_as_one"


class Rows(nn.Module):
    """Stands for a layer that is some ``rows`` of ``whole``: [.., I] to [.., number of rows]."""

    def __init__(self, whole: nn.Linear, rows: slice) -> None:
        super().__init__()
        self._whole = (whole,)  # in a tuple: its parameters are not ours
        self._rows = rows

    @property
    def weight(self) -> torch.Tensor:
        return self._whole[0].weight[self._rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._whole[0](x)[..., self._rows]
        return result


class SideBySide(nn.Module):
    """Stands for a layer whose rows are those of its children, one after the other."""

    def __init__(self, parts: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.children()], dim=-1)


def place_converted(
    model: PreTrainedModel, stored: Iterable[str], placed: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Conversion]]:
    """Return ``placed`` with the tensors of layers that were rebuilt, and the other parameters that are converted.

    ``placed``: see ``place_tensors``. The layers are rebuilt in ``model``, see ``regroup``; for the others see
    ``find_assembled``. What is stored twice is no longer tied in ``model``, see ``untie_stored``.
    """
    untie_stored(model, placed.values())
    conversions = find_conversions(model, stored, placed)
    places = {**placed, **regroup(model, conversions)}
    return places, find_assembled(model, conversions, places)


def regroup(model: PreTrainedModel, conversions: Iterable[Conversion]) -> dict[str, str]:
    """Rebuild linear layers of ``model`` as they are stored; return the parameter that each stored tensor fills.

    Only conversions that cut or concatenate rows count, or cut rows that alternate (Inkling's gate and up).
    """
    places: dict[str, str] = {}
    for conversion in conversions:
        *before, last = conversion.converter.operations
        alternate = len(before) == 1 and isinstance(before[0], Interleave) and not before[0].dim
        owners = [model.get_submodule(target.rpartition(".")[0]) for target in conversion.targets]
        if (before and not alternate) or vars(last).get("dim") or not all(map(_is_linear, owners)):
            continue
        if isinstance(last, Chunk | Split) and len(conversion.sources) == 1:
            places |= _join(model, conversion.sources[0], conversion.targets, alternate=alternate)
        elif isinstance(last, Concatenate) and not before and len(conversion.targets) == 1:
            places |= _divide(model, conversion.sources, conversion.targets[0])
    return places


def _is_linear(module: nn.Module) -> bool:
    """Return True for a linear layer, also if it has been rebuilt: its weight comes first, its bias later."""
    return type(module) is nn.Linear or isinstance(module, Rows | SideBySide)


def _join(model: nn.Module, source: str, targets: tuple[str, ...], *, alternate: bool) -> dict[str, str]:
    """Let the layers of ``targets`` be rows of one layer, which has the weight and the bias called ``source``.

    The rows of one follow those of another, or ``alternate`` with them.
    """
    paths = [target.rpartition(".")[0] for target in targets]
    name = f"{paths[0]}_{STORED}"
    parts = [part for part in map(model.get_submodule, paths) if isinstance(part, nn.Linear)]
    if parts:
        ends = list(accumulate((part.out_features for part in parts), initial=0))
        whole = _linear(parts[0], ends[-1])
        model.set_submodule(name, whole)
        for index, path in enumerate(paths):
            rows = slice(index, None, len(paths)) if alternate else slice(ends[index], ends[index + 1])
            model.set_submodule(path, Rows(whole, rows))
    return {source: f"{name}.{targets[0].rpartition('.')[2]}"}


def _divide(model: nn.Module, sources: tuple[str, ...], target: str) -> dict[str, str]:
    """Let the layer of ``target`` consist of one layer for each of ``sources``."""
    path, _, last = target.rpartition(".")
    names = [source.rpartition(".")[0].rpartition(".")[2] for source in sources]
    layer = model.get_submodule(path)
    if isinstance(layer, nn.Linear):
        rows = layer.out_features // len(sources)
        model.set_submodule(path, SideBySide({name: _linear(layer, rows) for name in names}))
    return {source: f"{path}.{name}.{last}" for source, name in zip(sources, names, strict=True)}


def _linear(like: nn.Linear, num_rows: int) -> nn.Linear:
    return nn.Linear(
        like.in_features, num_rows, bias=like.bias is not None, device="meta", dtype=like.weight.dtype
    ).requires_grad_(False)
