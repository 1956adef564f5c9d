"""Stacks of experts in modules of other forms than Transformers' own, brought into the forms that can be split.

DBRX keeps the rows of all experts in one matrix for each projection. JetMoe has one module for the inputs and one for
the outputs of all experts, also in its attention.

Legend: E experts, H hidden size, I inner size, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quantcore.engine.model.experts import linear_of

_ROWS = ("w1", "v1", "w2")
_INPUT, _OUTPUT = "input_linear", "output_linear"


def restack(model: nn.Module) -> None:
    """Rebuild the stacks of experts in ``model``, in place; what it computes stays the same."""
    for module in list(model.modules()):
        children = dict(module.named_children())
        if "mlp" in children and children["mlp"]._parameters.keys() == set(_ROWS):
            _fuse(module, children["mlp"])
        weights = [children[name]._parameters.get("weight") for name in (_INPUT, _OUTPUT) if name in children]
        if [weight.ndim for weight in weights if weight is not None] == [3, 3]:
            _divide(module)


def _fuse(experts: nn.Module, rows: nn.Module) -> None:
    """Give ``experts`` the parameters that ``experts.is_fused`` looks for, out of matrices [E * I, H] in ``rows``."""
    num_experts: int = experts.num_experts  # type: ignore[assignment]
    gate, up, down = (
        (matrix := rows.get_parameter(name).detach()).view(num_experts, -1, matrix.shape[-1]) for name in _ROWS
    )
    experts.gate_up_proj = nn.Parameter(torch.cat([gate, up], dim=1), requires_grad=False)
    experts.down_proj = nn.Parameter(down.mT, requires_grad=False)
    experts.act_fn = rows.activation_fn
    del experts.mlp


def _divide(mixture: nn.Module) -> None:
    """Give ``mixture`` a linear layer for each expert and projection, in ``experts``, which its two stacks call."""
    inputs, outputs = (mixture.get_submodule(name).get_parameter("weight").detach() for name in (_INPUT, _OUTPUT))
    names = ("gate_proj", "up_proj") if inputs.shape[1] == 2 * outputs.shape[2] else ("up_proj",)
    experts = nn.ModuleDict()
    for index, (rows, down) in enumerate(zip(inputs, outputs, strict=True)):
        layers = dict(zip(names, rows.chunk(len(names)), strict=True)) | {"down_proj": down}
        experts[str(index)] = nn.ModuleDict({name: linear_of(weight) for name, weight in layers.items()})
    mixture.experts = experts
    mixture.set_submodule(_INPUT, OneByOne(experts, names))
    mixture.set_submodule(_OUTPUT, OneByOne(experts, ("down_proj",)))


class OneByOne(nn.Module):
    """Stands for a stack of layers: applies the layers called ``names`` of each expert to the rows of its tokens."""

    def __init__(self, experts: nn.ModuleDict, names: Sequence[str]) -> None:
        super().__init__()
        self._experts = (experts,)  # in a tuple: its parameters are not ours
        self._names = names
        self.runs_all = False  # see ``SplitExperts``

    def forward(self, inputs: torch.Tensor, expert_size: Sequence[int]) -> torch.Tensor:
        """Map rows [N, in], sorted by expert, to [N, out]; ``expert_size`` has the number of rows of each expert."""
        pairs = zip(self._experts[0].values(), torch.split(inputs, list(expert_size)), strict=True)
        running = [(expert, rows) for expert, rows in pairs if len(rows) or self.runs_all]
        outputs = [[expert.get_submodule(name)(rows) for name in self._names] for expert, rows in running]
        return torch.cat([torch.cat(output, dim=-1) for output in outputs])
