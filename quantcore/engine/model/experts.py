"""Mixture of experts: the fused experts of Transformers 5 as one ``nn.Linear`` per expert and projection.

Transformers keeps the experts of a block in 3-D parameters, ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I], in
modules decorated with ``use_experts_implementation`` (``transformers/integrations/moe.py``; the decorator's flags mark
transposed, interleaved, gated or biased weights). Checkpoints hold one matrix per expert and projection. Split like the
checkpoint, every expert is an ordinary layer: planned, observed and quantized by itself.

Legend: E experts, H hidden size, I inner size, T tokens, K experts a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

_ROUTED: ContextVar[torch.Tensor | None] = ContextVar("routed", default=None)


def routed_tokens() -> torch.Tensor | None:
    """Return the numbers [N] of the tokens that the running expert was given, in the order of its input [N, H].

    None outside of an expert, and for tokens that the router did not send there.
    """
    return _ROUTED.get()


@dataclass(frozen=True)
class ProjectionNames:
    """A checkpoint's names for the projections of an expert (Mixtral: w1, w3, w2).

    Without a ``gate``, ``up`` holds both gate and up, whose rows alternate (gate 0, up 0, gate 1, ...), as those of
    gpt-oss and Inkling do.
    """

    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Form:
    """The flags of ``use_experts_implementation``, with the values that they have by default."""

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_concatenated: bool = True
    has_post_expert_norm: bool = False

    @classmethod
    def of(cls, fused: nn.Module) -> Form:
        """Return the form of a module: its flags if it has been decorated, else as the shapes of its parameters say."""
        if not _is_decorated(fused):
            up, down = fused.get_parameter("gate_up_proj"), fused.get_parameter("down_proj")
            return cls(is_transposed=up.shape[1:] == (down.shape[2], 2 * down.shape[1]))
        return cls(*(getattr(fused, flag.name) for flag in fields(cls)))


class SplitExperts(nn.Module):
    """Replaces a fused experts module by the children ``0`` .. ``E-1``, each with two or three linear layers.

    Their weights are views of the fused parameters (a transposed parameter gives strided ones): nothing is copied, and
    meta tensors stay meta. Only experts that get tokens run, and only on those tokens. Raises ValueError for names that
    would separate an interleaved gate and up.
    """

    def __init__(self, fused: nn.Module, names: ProjectionNames) -> None:
        super().__init__()
        form = Form.of(fused)
        if names.gate is not None and form.has_gate and not form.is_concatenated:
            raise ValueError("interleaved gate and up projections cannot be two layers: do not name the gate")
        self.names = names
        self.runs_all = False  # True: experts without tokens run as well, on empty inputs
        self.num_experts = fused.get_parameter("down_proj").shape[0]
        self._fused = (fused,)  # in a tuple, so that its parameters are not ours; its activation is still used
        self._form = form
        for name, child in fused.named_children():  # activation, norm after the expert
            self.add_module(name, child)
        for index in range(len(fused.get_parameter("gate_up_proj" if form.has_gate else "up_proj"))):
            self.add_module(str(index), nn.ModuleDict(_linears(fused, form, index, names)))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map hidden states [T, H], expert numbers [T, K] and their weights [T, K] to [T, H].

        Experts are summed in float32, bit for bit like Transformers' default (``grouped_mm``) in bfloat16. Without
        numbers the states are those of Llama 4, [E * T, H]: a copy of the tokens for each expert, with zeros in place
        of those that the router sends to others.
        """
        if top_k_index is None or top_k_weights is None:
            result = torch.zeros_like(hidden_states)
            [row] = hidden_states.any(dim=-1).nonzero(as_tuple=True)
            number = torch.div(row * self.num_experts, len(hidden_states), rounding_mode="floor")
            result[row] = self._route(hidden_states[row], number[:, None], hidden_states.new_ones(len(row), 1), row)
            return result
        return self._route(hidden_states.flatten(0, -2), top_k_index, top_k_weights).view(hidden_states.shape)

    def _route(
        self,
        x_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        numbers_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; ``numbers_T``: see ``routed_tokens``."""
        result = torch.zeros_like(x_TH, dtype=torch.promote_types(x_TH.dtype, torch.float32))
        for index, place in self._places(index_TK.T.flatten()):
            position, token = place // len(x_TH), place % len(x_TH)
            x_NH = x_TH[token]
            before = _ROUTED.set(token if numbers_T is None else numbers_T[token])
            try:
                output = self.run_expert(index, x_NH) if index < self.num_experts else x_NH  # LongCat: the identity
            finally:
                _ROUTED.reset(before)
            output = output * weights_TK[token, position, None]
            result.index_add_(0, token, output.to(result.dtype))
        return result.to(x_TH.dtype)

    def _places(self, chosen: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each expert that runs with its places in ``chosen``, in order. An accelerator is waited for once."""
        numbers, counts = torch.unique(chosen, return_counts=True)
        count_of = dict.fromkeys(range(self.num_experts), 0) if self.runs_all else {}
        count_of |= dict(torch.stack([numbers, counts], dim=1).tolist())
        yield from zip(count_of, torch.split(chosen.argsort(stable=True), list(count_of.values())), strict=True)

    def run_expert(self, index: int, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the output of one expert for hidden states [T, H], before any weight of a router."""
        fused: Any = self._fused[0]
        expert: Any = self.get_submodule(str(index))
        inner = expert[self.names.up](x_TH)
        if not self._form.has_gate:
            inner = fused.act_fn(inner)
        elif self.names.gate is None:
            if self._form.is_concatenated:  # by Transformers, which takes the stored rows apart
                inner = inner.unflatten(-1, (-1, 2)).mT.flatten(-2)
            inner = fused._apply_gate(inner)
        elif hasattr(fused, "_apply_gate"):
            inner = fused._apply_gate(torch.cat([expert[self.names.gate](x_TH), inner], dim=-1))
        else:
            inner = fused.act_fn(expert[self.names.gate](x_TH)) * inner
        output: torch.Tensor = expert[self.names.down](inner)
        return fused.post_expert_norm(output) if self._form.has_post_expert_norm else output


def is_fused(module: nn.Module) -> bool:
    """Return True for a module of fused experts whose parameters are still 3-D: decorated, or one that is called so."""
    if module._parameters.get("down_proj") is None:
        return False
    if _is_decorated(module):
        return True
    names = tuple(inspect.signature(module.forward).parameters)
    has_gate = module._parameters.get("gate_up_proj") is not None and hasattr(module, "act_fn")
    return has_gate and names in (("hidden_states",), ("hidden_states", "top_k_index", "top_k_weights"))


def stored_singly(block: nn.Module, start: str, stored: Container[str]) -> list[str]:
    """Return the modules in a block whose experts the checkpoint stores one by one.

    ``start`` is the block's name, and ``stored`` has the parameters that one stored tensor fills.
    """
    fused = [name for name, module in block.named_modules() if is_fused(module)]
    return [name for name in fused if f"{start}{name}.down_proj" not in stored]


def _is_decorated(module: nn.Module) -> bool:
    """Return True for a module of ``use_experts_implementation``, which gives it the flags of a ``Form``."""
    return hasattr(module, "is_concatenated")


def split_experts(model: nn.Module, names: ProjectionNames) -> list[str]:
    """Replace every fused experts module of a loaded model, in place. Returns the names of these modules.

    The 3-D parameters are gone afterwards; their memory is shared by the weights of the new linear layers.
    """
    fused_names = [name for name, module in model.named_modules() if is_fused(module)]
    for name in fused_names:
        fused = model.get_submodule(name)
        model.set_submodule(name, SplitExperts(fused, names))
        fused._parameters.clear()
    return fused_names


@contextmanager
def experts_split(block: nn.Module, modules: Iterable[str], names: ProjectionNames) -> Iterator[None]:
    """Split the experts of ``modules`` inside the block: a model need not hold all experts' layers at once.

    The fused modules come back unchanged, even if weights were loaded into the split ones.
    """
    fused = {name: block.get_submodule(name) for name in modules}
    for name, module in fused.items():
        block.set_submodule(name, SplitExperts(module, names))
    try:
        yield
    finally:
        for name, module in fused.items():
            block.set_submodule(name, module)


def _linears(fused: nn.Module, form: Form, index: int, names: ProjectionNames) -> dict[str, nn.Module]:
    """Return the linear layers of expert ``index``: views of the fused parameters, as [out, in]."""
    num_down = len(fused.get_parameter("down_proj"))
    up, up_bias = _part(fused, form, "gate_up_proj" if form.has_gate else "up_proj", index)
    linears = {names.down: linear_of(*_part(fused, form, "down_proj", index))} if index < num_down else {}
    if names.gate is None or not form.has_gate:
        return {names.up: linear_of(up, up_bias), **linears}
    gate, up = up.chunk(2)
    gate_bias, up_bias = (None, None) if up_bias is None else up_bias.chunk(2)
    return {names.gate: linear_of(gate, gate_bias), names.up: linear_of(up, up_bias), **linears}


def _part(fused: nn.Module, form: Form, name: str, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (weight [out, in], bias [out] or None) of one expert."""
    weight = fused.get_parameter(name)[index].detach()
    bias = fused.get_parameter(f"{name}_bias")[index].detach() if form.has_bias else None
    return weight.T if form.is_transposed else weight, bias


def linear_of(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> nn.Linear:
    """Return a linear layer with these parameters, without a copy of them."""
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias_O is not None:
        linear.bias = nn.Parameter(bias_O, requires_grad=False)
    return linear
