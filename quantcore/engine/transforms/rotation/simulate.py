"""Simulates a rotation of the residual stream without changing a matrix, for the proof in ``residual``.

Legend: H width of the stream, T tokens, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quantcore.engine.model.experts import SplitExperts
from quantcore.engine.transforms.rotation.hadamard import Rotation
from quantcore.engine.transforms.rotation.record import Residual, is_experts

PLAIN = (nn.Linear.forward, Conv1D.forward)  # forwards that are known to be x W^T + b


@contextmanager
def rotated(module: nn.Module, residual: Residual, rotation: Rotation, dtype: torch.dtype) -> Iterator[None]:
    """Let the module read and write a rotated stream, of ``dtype``, inside the block.

    Norms are neutral, readers' inputs are rotated back and multiplied with the norm's weight, writers' outputs are
    rotated: the effect of folding, without a copy of a matrix. Only routers of other classes, which may do anything
    with their input, get folded weights.
    """
    factors: dict[str, torch.Tensor] = {}
    with ExitStack() as undo:
        for norm in residual.norms:
            factor = norm.factor(module)
            if factor is not None:
                factors |= dict.fromkeys(norm.readers, factor)
                weight = module.get_submodule(norm.name).get_parameter("weight").data
                undo.callback(weight.copy_, weight.clone())
                weight.fill_(0.0 if norm.plus_one else 1.0)
        for name in residual.readers:
            part, factor = module.get_submodule(name), factors.get(name)
            if type(part).forward in PLAIN or is_experts(part):
                hook = _rotating_back(rotation, factor)
                undo.callback(part.register_forward_pre_hook(hook, with_kwargs=True).remove)
            else:
                undo.callback(part._parameters.__setitem__, "weight", part._parameters["weight"])
                wide_OI = part.get_parameter("weight").data.float() * (1.0 if factor is None else factor)
                part._parameters["weight"] = nn.Parameter(rotation.apply(wide_OI).to(dtype), requires_grad=False)
        for name in residual.writers:
            handle = module.get_submodule(name).register_forward_hook(lambda _, __, output: rotation.apply(output))
            undo.callback(handle.remove)
        yield


def _rotating_back(rotation: Rotation, factor_H: torch.Tensor | None) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def rotate_back(x: torch.Tensor) -> torch.Tensor:
            wide = rotation.inverse(x.float())
            return (wide if factor_H is None else wide * factor_H).to(x.dtype)

        if args:
            return (rotate_back(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: rotate_back(kwargs[first])}

    return hook


@contextmanager
def sent_to_all_experts(block: nn.Module) -> Iterator[None]:
    """Send tokens to a mixture's experts round robin inside the block, instead of by its router."""

    def hook(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
        if "top_k_index" not in call:  # it calls itself with the routing
            return args, kwargs
        index_TK, weights_TK = call["top_k_index"], call["top_k_weights"]
        num_tokens, num_experts = len(index_TK), _num_experts(experts)
        per_token = max(index_TK.shape[-1], -(-num_experts // num_tokens))
        experts_K = torch.arange(num_tokens * per_token, device=index_TK.device) % num_experts
        weights = torch.full((num_tokens, per_token), 1 / per_token, device=weights_TK.device, dtype=weights_TK.dtype)
        return (), call | {"top_k_index": experts_K.view(num_tokens, per_token), "top_k_weights": weights}

    with ExitStack() as undo:
        for part in block.modules():
            if is_experts(part):
                undo.callback(part.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _num_experts(experts: Any) -> int:
    return int(experts.num_experts if isinstance(experts, SplitExperts) else len(experts.down_proj))
