"""The gradients of log p(y) at every block of the float model, y drawn from its own predictions.

To second order the divergence KL(original || changed) is half the expected square of the change of log p(y): the Fisher
information (Martens, "New insights and perspectives on the natural gradient method", arXiv:1412.1193). So the gradients
say which changes of a layer's output count. One pass forward and one backward, block by block, give those of all
layers. Memory holds one block, and the hidden states before every block (on disk if they are large).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.states import States, all_states_kept
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.plan.workload import LOGIT_ROWS

Tell = Callable[[int, int], None]
"""Callback that gets the number of blocks done, forward and backward, and the number of all."""


@dataclass(frozen=True)
class StateGradients:
    """The gradients of log p(y) by the states [1, T, H] of ``num_windows`` windows behind every block."""

    states: MutableSequence[torch.Tensor]
    num_windows: int

    def behind(self, index: int, window: int) -> torch.Tensor:
        """Return the gradient by the states behind block ``index``."""
        gradient: torch.Tensor = self.states[index * self.num_windows + window]
        return gradient


@dataclass
class Call:
    """A call of a layer: its inputs [..., I], its outputs [..., O], and the gradient of log p(y) by the outputs."""

    name: str
    inputs: torch.Tensor
    outputs: torch.Tensor
    gradient: torch.Tensor = field(init=False)


class Gradients:
    """Gradients for a layer's call: by its weight [O, I], and by its inputs [..., I].

    Those by the inputs are only what this layer makes of them: others may read them too. Products are in the model's
    dtype, with sums in float32.
    """

    def __init__(self, call: Call, weight_OI: torch.Tensor) -> None:
        self._call = call
        self._weight_OI = weight_OI

    @cached_property
    def of_weight(self) -> torch.Tensor:
        return self._call.gradient.flatten(0, -2).T @ self._call.inputs.detach().flatten(0, -2)

    @cached_property
    def of_inputs(self) -> torch.Tensor:
        return self._call.gradient @ self._weight_OI


@dataclass(frozen=True)
class Back:
    """A block's run on one window: its output, the gradient by its input, and the calls of watched layers.

    Experts that got no tokens are not among the calls.
    """

    output: torch.Tensor
    gradient: torch.Tensor
    calls: list[Call]


class BackwardPass:
    """The float ``model`` and the hidden states [1, T, H] of all windows before every block and after the last.

    ``hidden`` is the input of the first block, and ``first_window`` the number of its first window in the whole text,
    of which other ranks may have others.
    """

    def __init__(self, model: StreamedModel, hidden: Hidden, folder: Path, tell: Tell, first_window: int = 0) -> None:
        self.model = model
        self.hidden = hidden
        self.num_blocks = model.num_blocks
        self.num_windows = len(hidden.states)
        self._first_window = first_window
        self._tell = tell
        self._states = self._forward(folder)

    def states_before(self, index: int) -> list[torch.Tensor]:
        """Return the states of all windows before block ``index``; those after the last for the number of blocks."""
        return [self._state(index, window) for window in range(self.num_windows)]

    def blocks(self, seed: int) -> Iterator[tuple[int, nn.Module, list[torch.Tensor]]]:
        """Yield each block with the gradients of log p(y) by its outputs: see ``blocks_behind``.

        ``seed`` draws the tokens y.
        """
        return self.blocks_behind(self._gradients_behind(seed))

    def blocks_behind(self, gradients: list[torch.Tensor]) -> Iterator[tuple[int, nn.Module, list[torch.Tensor]]]:
        """Yield each block, loaded, the last one first, with the gradients by its outputs: one [1, T, H] a window.

        ``gradients`` are those by the states after the last block. ``through`` must move every one of them to the
        block's inputs.
        """
        for index in reversed(range(self.num_blocks)):
            with self.model.block(index) as block:
                yield index, block, gradients
            self._tell(2 * self.num_blocks - index, 2 * self.num_blocks)

    def through(
        self, block: nn.Module, index: int, window: int, modules: Mapping[str, nn.Module], gradients: list[torch.Tensor]
    ) -> list[Call]:
        """Move the gradient of ``window`` through the block, in place; return the calls of the modules."""
        state = self._state(index, window).clone()
        back = back_through(self.hidden, state, block, index, window, modules, gradients[window])
        gradients[window] = back.gradient
        return back.calls

    def gradients(self, seed: int) -> StateGradients:
        """Return the gradients by the states behind every block. They replace the hidden states, which are used up."""
        for index, block, gradients in self.blocks(seed):
            for window in range(self.num_windows):
                behind = gradients[window]
                self.through(block, index, window, {}, gradients)
                self._states[self._place(index, window)] = behind
        return StateGradients(self._states, self.num_windows)

    def _forward(self, folder: Path) -> States:
        hidden = self.hidden
        size = (self.num_blocks + 1) * self.num_windows
        states = all_states_kept(size, (self.num_blocks + 1) * sum(state.nbytes for state in hidden.states), folder)
        states.extend(hidden.states)
        for index in range(self.num_blocks):
            with self.model.block(index) as block:
                self.model.run_block(block, index, hidden)
            states.extend(hidden.states)
            self._tell(index + 1, 2 * self.num_blocks)
        return states

    def _place(self, index: int, window: int) -> int:
        return index * self.num_windows + window

    def _state(self, index: int, window: int) -> torch.Tensor:
        state: torch.Tensor = self._states[self._place(index, window)]
        return state

    def _gradients_behind(self, seed: int) -> list[torch.Tensor]:
        """Return d log p(y) / d(states after the last block), one [1, T, H] for each window."""
        gradients: list[torch.Tensor] = []
        with self.model.head() as logits:
            for window in range(self.num_windows):
                generator = torch.Generator().manual_seed(seed + self._first_window + window)
                state = self._state(self.num_blocks, window).clone().requires_grad_()
                with torch.enable_grad():
                    log_p = log_p_of_drawn(logits(state)[0], generator)
                    gradients += torch.autograd.grad(log_p, state)
        return gradients


def back_through(
    hidden: Hidden,
    state: torch.Tensor,
    block: nn.Module,
    index: int,
    window: int,
    modules: Mapping[str, nn.Module],
    gradient: torch.Tensor,
) -> Back:
    """Run a float block forward and backward on one window; ``gradient`` is that by the block's output."""
    state = state.requires_grad_()
    with _calls_noted(modules) as calls, torch.enable_grad():
        output = hidden.run_on(state, block, index, window)
        tensors = [state, *(call.outputs for call in calls)]
        before, *at_outputs = torch.autograd.grad(output, tensors, gradient, materialize_grads=True)
    for call, at_output in zip(calls, at_outputs, strict=True):
        call.gradient = at_output
    return Back(output.detach(), before, [call for call in calls if call.inputs.numel()])


@contextmanager
def _calls_noted(modules: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Record the calls of the modules inside the block, in their order."""
    calls: list[Call] = []

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
            if isinstance(output, torch.Tensor):  # a router returns several
                calls.append(Call(name, inputs[0], output))

        return note

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(module.register_forward_hook(noting(name)))
        yield calls


def log_p_of_drawn(logits_TV: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the sum over the tokens of log p(y), y drawn from p; part of the graph."""
    drawn = []
    for logits_RV in torch.split(logits_TV, LOGIT_ROWS):
        log_p = functional.log_softmax(logits_RV.float(), -1)
        drawn.append(log_p.gather(-1, _drawn(log_p.detach(), generator)).sum())
    return torch.stack(drawn).sum()


def _drawn(log_p_RV: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw a token [R, 1] from every row, by the inverse of its distribution function.

    ``torch.multinomial`` takes five times as long on a CPU: it draws a random number for every entry.
    """
    below_RV = log_p_RV.exp().cumsum(-1)
    share_R1 = torch.rand(len(below_RV), 1, generator=generator).to(below_RV.device)
    y_R1 = torch.searchsorted(below_RV, share_R1 * below_RV[:, -1:], right=True)
    return y_R1.clamp_(max=below_RV.shape[1] - 1)
