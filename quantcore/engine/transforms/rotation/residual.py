"""Finds the readers and writers of a decoder block's residual stream by recording runs of the block, and proves them.

If the stream x [1, T, H] becomes x R with an orthogonal R, then readers must multiply their inputs by R^T first and
writers their outputs by R; both can be folded into weights (``rotation``; QuaRot, Ashkboos et al. 2024). That works if
x is read through norms that divide by the length only (RMSNorm), and if only factors per token stand between a writer
and the stream. There is no table of architectures: readers are recognized by their input while all writers are silent,
writers by the place where their values appear. The result is then proven with an actual rotation.

Legend: H width of the stream, T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quantcore.engine.model.experts import SplitExperts
from quantcore.engine.transforms.mappings.scale_pair import shape_of
from quantcore.engine.transforms.rotation.hadamard import Rotation, orthogonal
from quantcore.engine.transforms.rotation.record import (
    Replace,
    Residual,
    Run,
    StreamNorm,
    StreamRecord,
    close,
    errors_of,
    has_matrix,
    is_experts,
    norm_like,
    parallel,
    random_like,
    record_stream,
    same,
    widened_as_used,
)
from quantcore.engine.transforms.rotation.simulate import rotated, sent_to_all_experts
from quantcore.errors import ModelError

__all__ = ["Residual", "StreamNorm", "find_embedding", "find_head", "find_residual", "tolerance"]


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative change that rounding explains.

    Measured on eleven tiny architectures: blocks, in float32, 1e-6 to 4e-6; with one reader, writer or norm left out
    0.29 and more. Embeddings and heads compute in their own dtype: 2e-3 and 1e-2 in SmolLM2's bfloat16.
    """
    return 1e-3 if torch.finfo(dtype).bits >= 32 else 1e-1


def find_residual(block: nn.Module, run: Run, like: torch.Tensor, rotation: Rotation | None = None) -> Residual:
    """Return norms, readers and writers of ``block``, proven with ``rotation`` (a random one if it is None).

    ``run`` calls the block with other hidden states and returns its output, both shaped like ``like`` [1, T, H], whose
    values do not matter. The block is run about ten times and is unchanged at the end. Raises ModelError
    ``cannot_rotate`` that explains why its stream cannot be rotated.
    """
    with torch.no_grad(), widened_as_used(block):
        x = random_like(like, seed=1).float()
        plain = record_stream(block, lambda: run(x), x.shape[-1])
        writers, silent, scale = _find_writers(block, lambda: run(x), x, x.shape[-1], plain)
        norms, readers = _find_readers(block, silent, x)
        residual = Residual(norms, tuple(readers), tuple(writers))
        update = (plain.output.float() - scale * x.float()).square().mean().sqrt()
        x = x * (update / x.float().square().mean().sqrt()).clamp(min=1e-3).to(x.dtype)  # neither hides the other
        rotation = rotation or orthogonal(x.shape[-1], seed=2)
        return replace(residual, change=_prove(block, run, x, residual, rotation, scale))


def find_head(model: nn.Module, run: Run, like: torch.Tensor, rotation: Rotation | None = None) -> Residual:
    """Find and prove the readers after the last block: the final norm and the layer that computes logits.

    ``run`` maps hidden states shaped like ``like`` [1, T, H] to logits.
    """
    with torch.no_grad():
        x = random_like(like, seed=1)
        plain = record_stream(model, lambda: run(x), x.shape[-1])
        norms, readers = _find_readers(model, plain, x)
        residual = Residual(norms, tuple(readers))
        rotation = rotation or orthogonal(x.shape[-1], seed=2)
        with rotated(model, residual, rotation, x.dtype):
            after = run(rotation.apply(x))
        return replace(residual, change=_accepted(errors_of(plain.output, after, plain.output).max().item(), x.dtype))


def find_embedding(
    model: nn.Module, run: Callable[[], torch.Tensor], width: int, rotation: Rotation | None = None
) -> Residual:
    """Find and prove the writers before the first block: embeddings, of tokens and of positions.

    ``run`` embeds some token ids and returns the stream [1, T, H] of ``width`` H.
    """
    with torch.no_grad():
        plain = record_stream(model, run, width)
        writers, _, _ = _find_writers(model, run, None, width, plain)
        residual = Residual(writers=tuple(writers))
        rotation = rotation or orthogonal(width, seed=2)
        with rotated(model, residual, rotation, plain.output.dtype):
            after = rotation.inverse(run())
        change = errors_of(plain.output, after, plain.output).max().item()
        return replace(residual, change=_accepted(change, plain.output.dtype))


def _find_writers(
    module: nn.Module, run: Callable[[], torch.Tensor], x: torch.Tensor | None, width: int, plain: StreamRecord
) -> tuple[list[str], StreamRecord, float]:
    """Return the names of the writers, the record with all of them silent, and the factor of x at the end then.

    Every layer with outputs as wide as the stream is made to return zeros, then one after the other random numbers:
    those of a writer appear at the end, times one number a token.
    """
    units = [name for name in plain.outputs if is_experts(part := module.get_submodule(name)) or has_matrix(part)]
    silence: dict[str, Replace] = dict.fromkeys(units, torch.zeros_like)
    silent = record_stream(module, run, width, silence)
    scale = 0.0
    if x is not None:
        scale = (silent.output.float() * x.float()).sum().item() / x.float().square().sum().item()
    if not close(silent.output, torch.zeros_like(silent.output) if x is None else scale * x):
        raise _refusal(
            "it does not pass through unchanged",
            "A norm is applied to it, or something other than linear layers and experts writes to it",
        )
    writers: list[str] = []
    for name in units:
        noise: list[torch.Tensor] = []

        def shout(output: torch.Tensor, noise: list[torch.Tensor] = noise) -> torch.Tensor:
            noise.append(random_like(output, seed=3))
            return noise[-1]

        loud = record_stream(module, run, width, {**silence, name: shout})
        if torch.equal(loud.output, silent.output) or not noise:
            continue
        written = loud.output - silent.output
        between = next((other for other in norm_like(module, loud) if same(loud.inputs[other], noise[0])), None)
        if between is not None:
            raise _refusal(f"{between} normalizes the output of {name} before it is added to the stream")
        if written.numel() != noise[0].numel() or not parallel(written, noise[0], part_of=loud.output):
            raise _refusal(f"the output of {name} is changed channel by channel before it is added to the stream")
        writers += _expert_layers(module, name, reading=False)
    return writers, silent, scale


def _find_readers(module: nn.Module, silent: StreamRecord, x: torch.Tensor) -> tuple[tuple[StreamNorm, ...], list[str]]:
    """Find the norms whose input is the stream, and the layers that read them, or the stream itself."""
    norms: dict[str, list[str]] = {name: [] for name in norm_like(module, silent) if parallel(silent.inputs[name], x)}
    readers: list[str] = []
    for name, value in silent.inputs.items():
        part = module.get_submodule(name)
        if not (is_experts(part) or (has_matrix(part) and shape_of(part)[1] == x.shape[-1])):
            continue
        norm = _source(value, {norm: silent.outputs[norm] for norm in norms})
        if norm is None and not parallel(value, x):
            continue
        layers = _expert_layers(module, name, reading=True)
        readers += layers
        if norm is not None:
            norms[norm] += layers
    return tuple(
        _examined(module, name, layers, silent.inputs[name]) for name, layers in norms.items() if layers
    ), readers


def _source(x: torch.Tensor, outputs: dict[str, torch.Tensor]) -> str | None:
    """Return the name of the output that x is.

    Norms with equal weights give equal outputs: then the one with the same storage, or the last.
    """
    equal = [name for name, output in outputs.items() if same(x, output)]
    very = [name for name in equal if outputs[name].data_ptr() == x.data_ptr()]
    return next(reversed(very or equal), None)


def _examined(module: nn.Module, name: str, readers: list[str], like: torch.Tensor) -> StreamNorm:
    """Return the norm after a check that it divides by the length only and multiplies with weight or 1 + weight."""
    norm = deepcopy(module.get_submodule(name)).float()
    x = random_like(like, seed=4).float()
    weight = getattr(norm, "weight", None)
    plus_one = False
    before = norm(x)
    if weight is not None:
        kept = weight.clone()
        weight.zero_()
        plus_one = not torch.equal(norm(x), norm(-x))  # otherwise only a bias is left
        weight.fill_(0.0 if plus_one else 1.0)
        neutral = norm(x) * (kept + (1.0 if plus_one else 0.0))
    else:
        neutral = before
    if close(norm(x + 3), norm(x)):
        raise _refusal(
            f"{name} subtracts the mean over channels (LayerNorm), which a rotation changes",
            "Only RMSNorm can be folded",
        )
    rotation = orthogonal(x.shape[-1], seed=5)
    if not close(norm(rotation.apply(x)), rotation.apply(norm(x))):
        raise _refusal(f"{name} ({type(norm).__name__}) does more than divide by the norm")
    if not close(before, neutral):
        raise _refusal(f"{name} ({type(norm).__name__}) does more than divide by the norm and multiply by a weight")
    return StreamNorm(name, tuple(readers), plus_one)


def _prove(block: nn.Module, run: Run, x: torch.Tensor, residual: Residual, rotation: Rotation, scale: float) -> float:
    """Return the largest relative change of the block's update under ``rotation``.

    A mixture is run twice: with tokens sent to all experts in turn, which tries each of them; then with its routers,
    where the median token counts, because rounding may move a token between two experts to the other one.
    """
    changes: list[float] = []
    for everywhere in (True, False) if any(is_experts(part) for part in block.modules()) else (False,):
        with sent_to_all_experts(block) if everywhere else nullcontext():
            before = run(x)
            with rotated(block, residual, rotation, x.dtype):
                after = rotation.inverse(run(rotation.apply(x)))
        update = before.float() - scale * x.float()
        errors_T = errors_of(before, after, update)
        has_choice = not everywhere and len(changes) == 1
        changes.append((errors_T.median() if has_choice else errors_T.max()).item())
    return _accepted(max(changes), x.dtype)


def _accepted(change: float, dtype: torch.dtype) -> float:
    if not change <= tolerance(dtype):
        raise _refusal(
            f"rotated, it computes something else (relative change {change:.1e})",
            "A part of it reads the stream or writes to it in an unknown way",
        )
    return change


def _expert_layers(module: nn.Module, name: str, *, reading: bool) -> list[str]:
    """Return the layer itself, or the experts' layers that read or write the stream; fused experts count as one."""
    part: Any = module.get_submodule(name)
    if not is_experts(part):
        return [name]
    fused = part._fused[0] if isinstance(part, SplitExperts) else part
    if fused.has_post_expert_norm:
        raise _refusal(f"{name} normalizes the output of each expert before it is added to the stream")
    if not isinstance(part, SplitExperts):
        return [name]
    names = [part.names.gate, part.names.up] if reading else [part.names.down]
    layers = [f"{index}.{layer}" for index in range(part.num_experts) for layer in names]
    present = {layer for layer, _ in part.named_modules()}
    return [f"{name}.{layer}" for layer in layers if layer in present]


def _refusal(reason: str, hint: str = "") -> ModelError:
    return ModelError(
        f"The residual stream of this model cannot be rotated: {reason}.",
        code="cannot_rotate",
        hint=f"{hint}. Remove r1." if hint else "Remove r1.",
        field="/algo_config/r1",
    )
