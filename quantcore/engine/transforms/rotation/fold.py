"""Folds rotations into weights, which spreads outliers of one channel over all (QuaRot, Ashkboos et al. 2024).

R1 rotates the residual stream, x -> x R: embeddings and writers give rotated outputs, the weights of norms move into
the layers that read them, and these rotate back. R2 rotates the values of each head between v and o. Both keep the
function of the float model and cost nothing at run time. R4 rotates the input of a layer while the model runs.

Weights change in place, in tiles of float32 that are small compared with a matrix. Legend: H width of the stream, [O,
I] a weight, V vocabulary, D values of a head, F outputs that an edge passes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quantcore.engine.model.experts import Form, is_fused
from quantcore.engine.runtime.shards import changing
from quantcore.engine.transforms.mappings.scale_pair import ScalePair, kind_of
from quantcore.engine.transforms.rotation.hadamard import Rotation, orthogonal
from quantcore.engine.transforms.rotation.record import (
    Residual,
    Run,
    errors_of,
    has_matrix,
    random_like,
    rows_of,
    widened_as_used,
)
from quantcore.engine.transforms.rotation.residual import tolerance
from quantcore.errors import CalibrationError
from quantcore.formats.weight_layout import canonical

MAX_WIDE_VALUES = 1 << 22  # of a weight that are in float32 at once
MIN_TOKENS = 8
SAME_HEAD = 1e-4  # largest relative difference of two channels of one head: rounding of float32


def rotate_residual(module: nn.Module, residual: Residual, rotation: Rotation) -> list[str]:
    """Rotate the modules of ``residual`` in ``module`` by R1, and return the changed parameters.

    ``module`` is a block or the whole model. The weights of its norms become neutral (1, or 0 where the norm adds 1);
    the readers take them over. For embeddings and the last layer pass the results of ``find_embedding`` and
    ``find_head``. If these share one weight, the model must get two before: the final norm is folded into one of them
    only, and only one reads the stream.
    """
    changed: list[str] = []
    factors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for norm in residual.norms:
            factor = norm.factor(module)
            if factor is not None:
                factors |= dict.fromkeys(norm.readers, factor)
                module.get_submodule(norm.name).get_parameter("weight").data.fill_(0.0 if norm.plus_one else 1.0)
                changed.append(f"{norm.name}.weight")
        for name in residual.readers:
            with _matrix(module.get_submodule(name), reading=True) as (parameter, weight_OI):
                rotate_rows(weight_OI, rotation, factors.get(name))
            changed.append(f"{name}.{parameter}")
        for name in residual.writers:
            part = module.get_submodule(name)
            with _matrix(part, reading=False) as (parameter, weight_OI):
                if isinstance(part, nn.Embedding):
                    rotate_rows(weight_OI, rotation)  # it writes its rows
                else:
                    rotate_columns(weight_OI, rotation)
            changed.append(f"{name}.{parameter}")
            if (bias := part._parameters.get(_bias_name(part))) is not None:
                with changing(bias) as bias_O:  # of fused experts [E, O]
                    bias_O.copy_(rotation.apply(bias_O))
                changed.append(f"{name}.{_bias_name(part)}")
    return changed


def rotate_rows(weight_OI: torch.Tensor, rotation: Rotation, factor_I: torch.Tensor | None = None) -> None:
    """Set W <- W diag(factor) R in place, for readers of x R, which lacks the norm's weight ``factor_I``.

    Works also for embeddings [V, H], which write their rows. An axis of experts may come first: [E, O, I].
    """
    for matrix_OI in _matrices(weight_OI):
        for rows_OI in torch.split(matrix_OI, max(1, MAX_WIDE_VALUES // matrix_OI.shape[1])):
            wide_OI = rows_OI.to(torch.promote_types(rows_OI.dtype, torch.float32))
            rows_OI.copy_(rotation.apply(wide_OI if factor_I is None else wide_OI * factor_I.to(wide_OI)))


def rotate_columns(weight_OI: torch.Tensor, rotation: Rotation) -> None:
    """Set W <- R^T W in place, for writers, which then write y R. An axis of experts may come first: [E, O, I]."""
    for matrix_OI in _matrices(weight_OI):
        rotate_rows(matrix_OI.T, rotation)


def find_head_size(block: nn.Module, edge: ScalePair, run: Run, like: torch.Tensor) -> int | None:
    """Return the result of ``find_head_sizes`` for one edge."""
    return find_head_sizes(block, [edge], run, like)[0]


def find_head_sizes(block: nn.Module, edges: Sequence[ScalePair], run: Run, like: torch.Tensor) -> list[int | None]:
    """Return for each edge (v -> o) the number of neighbouring values that R2 may rotate: those of one head.

    The result is None where it may rotate none: an activation or a gate lies between, or heads have a single channel.
    All values of a token are set to one random number: the input of o then is equal for all channels of a head, but
    differs between two heads, which attend to other tokens. That takes one run for all edges, and two more to prove
    each size with an actual rotation. ``run`` and ``like`` [1, T, H]: see ``find_residual``. Raises CalibrationError
    for less than 8 tokens, where heads could not be told apart.
    """
    if len(rows_of(like)) < MIN_TOKENS:
        raise CalibrationError(
            f"Heads are distinguished by the tokens they attend to, but there are only {len(rows_of(like))}.",
            code="too_few_tokens",
            hint=f"Use windows of at least {MIN_TOKENS} tokens, or remove r2.",
            field="/calibration/seq_len",
        )
    with torch.no_grad(), widened_as_used(block):
        x = random_like(like, seed=1).float()
        arriving = _arriving(block, [edge for edge in edges if has_matrix(block.get_submodule(edge.producer))], run, x)
        sizes = [_head_size(arriving[edge.consumers[0]]) if edge.consumers[0] in arriving else 1 for edge in edges]
        return [
            size if size > 1 and _fits(edge, size) and _may_rotate(block, edge, size, run, x) else None
            for edge, size in zip(edges, sizes, strict=True)
        ]


def rotate_values(block: nn.Module, edge: ScalePair, head: Rotation) -> list[str]:
    """Rotate the values of every head of ``edge`` (v -> o) by R2 = ``head``, in place. Returns the changed parameters.

    ``head.size`` is a divisor of the result of ``find_head_size``. Raises ValueError if it does not fit the edge.
    """
    if not _fits(edge, head.size):
        raise ValueError(f"heads of {head.size} values do not fit {edge.num_scales} of {edge.producer}")
    producer = block.get_submodule(edge.producer)
    changed = [f"{edge.producer}.weight"]
    with torch.no_grad():
        rotation = head.repeated(edge.num_scales // head.size)
        with _matrix(producer, reading=False) as (_, weight_OI):
            rows = edge.rows.to(weight_OI.device)
            values_FI = weight_OI[rows]
            rotate_columns(values_FI, rotation)
            weight_OI[rows] = values_FI
        if getattr(producer, "bias", None) is not None:
            with changing(producer.get_parameter("bias")) as bias_O:
                bias_O[rows] = rotation.apply(bias_O[rows])
            changed.append(f"{edge.producer}.bias")
        for name in edge.consumers:
            with _matrix(block.get_submodule(name), reading=True) as (_, weight_OI):
                rotate_rows(weight_OI, head.repeated(len(edge.channels) // head.size))
            changed.append(f"{name}.weight")
    return changed


class InputRotation:
    """A forward pre-hook that rotates a layer's input, x -> x R, at run time (R4)."""

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.rotation.apply(args[0]), *args[1:])


def rotates_input(layer: nn.Module) -> bool:
    """Return True if R4 rotates the input of ``layer``."""
    return any(isinstance(hook, InputRotation) for hook in layer._forward_pre_hooks.values())


def rotate_input(block: nn.Module, name: str, rotation: Rotation) -> RemovableHandle:
    """Apply R4 to the linear layer ``name``: W <- W R in place, and a hook that rotates its input at run time.

    It is for layers whose input no weight can rotate beforehand: down_proj, after the activation. A model in memory
    runs this, also after ``ModelQuantizer``: its layers keep their hooks, and quantize the rotated input. A checkpoint
    cannot store it: with such a weight it is wrong for every program that does not rotate the input by the same matrix
    (only AMD Quark's loader is known to do so, from tensors called ``input_rotation``).

    R3, on queries and keys after RoPE, changes no weight: it is in ``nn.attention``.
    """
    layer = block.get_submodule(name)
    with torch.no_grad(), _matrix(layer, reading=True) as (_, weight_OI):
        rotate_rows(weight_OI, rotation)
    return layer.register_forward_pre_hook(InputRotation(rotation))


def _matrices(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (weight,) if weight.ndim == 2 else weight.unbind(0)


@contextmanager
def _matrix(part: nn.Module, *, reading: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of the parameter that reads or writes the stream, as [O, I], to be changed in place.

    For fused experts it is [E, O, I].
    """
    experts: Any = part
    if not is_fused(part):
        with changing(part.get_parameter("weight")) as weight:
            yield "weight", canonical(weight, kind_of(part))
        return
    name = "down_proj" if not reading else "gate_up_proj" if Form.of(experts).has_gate else "up_proj"
    stack = part.get_parameter(name).data
    yield name, stack.transpose(1, 2) if Form.of(experts).is_transposed else stack


def _bias_name(part: nn.Module) -> str:
    return "down_proj_bias" if is_fused(part) else "bias"


def _fits(edge: ScalePair, size: int) -> bool:
    """Return True if the channels of ``edge`` are whole heads of this size, their values in order."""
    if edge.num_scales % size or len(edge.channels) % size:
        return False
    heads = edge.channels.view(-1, size)
    in_order = heads[:, :1] + torch.arange(size, device=heads.device)
    return bool((heads[:, 0] % size == 0).all() and (heads == in_order).all())


def _arriving(block: nn.Module, edges: Sequence[ScalePair], run: Run, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the input [T, I] of each edge's first consumer if all values of a token are one random number."""
    arriving: dict[str, torch.Tensor] = {}

    def speak(_: nn.Module, __: Any, output: torch.Tensor, edge: ScalePair) -> torch.Tensor:
        number = random_like(output[..., :1], seed=3)
        number.view(-1)[0] = 0  # heads that all attend to the first token then differ by the rest
        return output.index_copy(-1, edge.rows.to(output.device), number.expand(*output.shape[:-1], edge.num_scales))

    def listen(_: nn.Module, args: tuple[Any, ...], name: str) -> None:
        arriving[name] = rows_of(args[0])

    with ExitStack() as undo:
        for edge in edges:
            speaking, listening = partial(speak, edge=edge), partial(listen, name=edge.consumers[0])
            undo.callback(block.get_submodule(edge.producer).register_forward_hook(speaking).remove)
            undo.callback(block.get_submodule(edge.consumers[0]).register_forward_pre_hook(listening).remove)
        run(x)
    return arriving


def _head_size(arriving_TI: torch.Tensor) -> int:
    """Return the greatest common divisor of the positions where neighbouring channels differ."""
    step = (arriving_TI[:, 1:] - arriving_TI[:, :-1]).norm(dim=0)
    size = torch.minimum(arriving_TI[:, 1:].norm(dim=0), arriving_TI[:, :-1].norm(dim=0))
    borders = (step > SAME_HEAD * size).nonzero().flatten() + 1
    return gcd(arriving_TI.shape[1], *borders.tolist())


def _may_rotate(block: nn.Module, edge: ScalePair, size: int, run: Run, x: torch.Tensor) -> bool:
    head = orthogonal(size, seed=2)
    before = run(x)
    with _values_rotated(block, edge, head):
        after = run(x)
    return errors_of(before, after, before - x).max().item() <= tolerance(x.dtype)


@contextmanager
def _values_rotated(block: nn.Module, edge: ScalePair, head: Rotation) -> Iterator[None]:
    """Let the producer write rotated values and the consumers rotate them back, inside the block."""

    def rotate(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        rows = edge.rows.to(output.device)
        rotated = head.repeated(edge.num_scales // head.size).apply(output[..., rows])
        return output.index_copy(-1, rows, rotated)

    def rotate_back(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (head.repeated(len(edge.channels) // head.size).inverse(args[0]), *args[1:])

    with ExitStack() as undo:
        undo.callback(block.get_submodule(edge.producer).register_forward_hook(rotate).remove)
        for name in edge.consumers:
            undo.callback(block.get_submodule(name).register_forward_pre_hook(rotate_back).remove)
        yield
