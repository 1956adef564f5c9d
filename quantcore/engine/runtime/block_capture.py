"""Runs a model without its decoder blocks: records their inputs, and replaces their outputs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quantcore.engine.model.kinds import Kind, neutral_token, outputs_of
from quantcore.engine.model.parameter_names import FROM_FILE_TO_FILE
from quantcore.engine.runtime.arguments import Arguments, passed_on
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.engine.runtime.states import Axes, packed, unpacked
from quantcore.errors import ModelError, reason_of

MAX_RETURNED = 4
"""Upper bound on the values that a block may return: the hidden states, and others."""


ADDED_TOLERANCE = 0.02
"""Largest change of what is added to other states, by its norm: x + y - x in bfloat16 is not exactly y."""

_OF_CODE = re.compile(r"dtype|device meta|shape|size|dimension|same type|scalar type", re.IGNORECASE)


class Reached(Exception):
    """Raised when the first block is called; its input is in the relay."""


@dataclass
class BlockBoundary:
    """The states at the replaced blocks: the first one's input is ``seen``; it returns ``give`` instead if that is set.

    ``passed`` is the output of the last block that was called; ``num_returned`` the number of values that blocks return
    as a tuple, 0 for the hidden states alone. The other values stand for themselves (``PassedOn``) if ``passes_on``,
    else they are None. ``num_calls`` counts the calls of the first block. With ``stops`` that raises ``Reached``, and
    nothing after it runs. With ``notes_added``, the model may add to the states between its blocks.
    """

    num_returned: int
    passes_on: bool = True
    give: torch.Tensor | None = None
    stops: bool = False
    seen: torch.Tensor | None = None
    num_calls: int = 0
    passed: torch.Tensor | None = None
    notes_added: bool = False

    def run(self, model: Callable[[], object]) -> torch.Tensor:
        """Call ``model``; returns the hidden states that reach its first block.

        The number of values that its code takes from a block, and whether it passes them on to later blocks unseen,
        shows only when that code runs: they are tried in turn. Raises ModelError for a model that is not such a chain.
        """
        failures: list[Exception] = []
        numbers = sorted(range(MAX_RETURNED + 1), key=lambda count: count != self.num_returned)
        for number, passes_on in product(numbers, (True, False)):
            if number < 2 and not passes_on:
                continue  # there are no other values
            self.num_returned, self.passes_on, self.seen, self.num_calls = number, passes_on, None, 0
            try:
                with suppress(Reached):  # by blocks after these
                    model()
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # models raise various errors for an unexpected number of values
                failures.append(error)
                continue
            if self.num_calls > 1:
                raise no_chain("it runs the first block more than once")
            return self.reached()
        explained = next((failure for failure in failures if isinstance(failure, ModelError)), None)
        raise explained or no_chain(f"its code fails outside the blocks ({reason_of(failures[0])})") from failures[0]

    def run_with_additions(self, model: Callable[[], object], arguments: Sequence[Arguments]) -> torch.Tensor:
        """Call ``model`` as ``run`` does, and note in ``arguments`` what it adds to the states between its blocks.

        The addition is exact for states of zero. Raises ModelError if it is another one for the model's own states.
        """
        self.notes_added = True
        state, before = self.run(model), [each.added for each in arguments]
        if all(added is None for added in before):
            return state
        self.give = torch.zeros_like(state)
        self.run(model)
        for each, own in zip(arguments, before, strict=True):
            exact = torch.zeros(()) if each.added is None else each.added
            if own is not None and (own - exact).norm() > ADDED_TOLERANCE * own.norm():
                raise no_chain("its computations between decoder blocks depend on their outputs")
        return state

    def reached(self) -> torch.Tensor:
        """Return the input of the first block. Raises ModelError if it was not called."""
        if self.seen is None:
            raise no_chain("it never calls the first block")
        return self.seen


def no_chain(what: str) -> ModelError:
    """Return the error for a model that is not a plain chain of decoder blocks; ``what`` is the evidence."""
    return ModelError(
        f"This model cannot be run decoder block by decoder block: {what}.",
        code="unsupported_architecture",
        hint=f"Bitfoundry streams models that are a plain chain of decoder blocks. {FROM_FILE_TO_FILE}",
    )


@contextmanager
def model_code(part: str) -> Iterator[None]:
    """Raise ModelError if the model's code for ``part`` raises inside the context.

    Of PyTorch's errors these are the ones about dtypes, shapes and weights that are not stored; others are about memory
    and processes.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:  # any model's code
        is_other = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        if is_other and not _OF_CODE.search(str(error)):
            raise
        raise no_chain(f"the code of {part} fails ({reason_of(error)})") from error


@contextmanager
def blocks_replaced(
    blocks: Iterable[nn.Module],
    arguments: list[Arguments],
    *,
    num_returned: int,
    passes_on: bool = True,
    start: int = 0,
) -> Iterator[BlockBoundary]:
    """Let the blocks record their calls in ``arguments`` and pass the states through, inside the ``with``.

    ``start`` is the number of the first block. For the other values see ``BlockBoundary``.
    """
    relay = BlockBoundary(num_returned, passes_on)
    before = [block.__dict__.get("forward") for block in blocks]
    for index, block in enumerate(blocks):
        block.forward = _recorder(block.forward, arguments[index], relay, start + index, is_first=index == 0)
    try:
        yield relay
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                del block.forward  # the class's own forward again
            else:
                block.forward = forward


def _recorder(
    replaced: Callable[..., Any], arguments: Arguments, relay: BlockBoundary, index: int, *, is_first: bool
) -> Callable[..., Any]:
    """Return a replacement for a block's forward, ``replaced``: it records the arguments and passes the states on.

    The model must pass exactly the output of one block to the next: computations between them would be lost.
    """
    name = next(iter(inspect.signature(replaced).parameters))

    def forward(*positional: Any, **named: Any) -> Any:
        hidden_states, *rest = positional or (named.pop(name),)
        arguments.positional, arguments.named, arguments.is_skipped = tuple(rest), named, False
        if is_first:
            relay.seen = hidden_states
            relay.num_calls += 1
            if relay.stops:
                raise Reached
            hidden_states = hidden_states if relay.give is None else relay.give
        elif relay.passed is None or not _is_all_of(hidden_states, relay.passed):
            if not relay.notes_added or relay.passed is None or relay.passed.shape != hidden_states.shape:
                raise no_chain("it computes something between its decoder blocks")
            arguments.added = hidden_states - relay.passed
        relay.passed = hidden_states
        if not relay.num_returned:
            return hidden_states
        places = range(1, relay.num_returned)
        return hidden_states, *(passed_on(index, place) if relay.passes_on else None for place in places)

    return forward


def _is_all_of(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if it is the tensor itself, or a view of all of it (a slice without bounds)."""
    return view is tensor or (
        (view.shape, view.stride(), view.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        and view.data_ptr() == tensor.data_ptr()
    )


@dataclass(frozen=True)
class NonBlockParts:
    """The model around its blocks, with its weights in memory: call it for its outputs.

    ``inputs`` returns the model's named inputs for token ids [1, T].
    """

    model: PreTrainedModel
    relay: BlockBoundary
    device: torch.device
    kind: Kind
    inputs: Callable[[torch.Tensor], dict[str, Any]]
    axes: Axes = (0, 1)

    def __call__(self, state: torch.Tensor, ids_NT: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the logits [1, T, V] from the last block's output [1, T, H]; see ``outputs_of``.

        They do not depend on the tokens ``ids_NT`` [1, T], unless the head reads more than that output.
        """
        if ids_NT is None:
            num_tokens = state.shape[1] * self.kind.tokens_per_state
            ids_NT = torch.full((1, num_tokens), neutral_token(self.model.config))
        return self._run(ids_NT, state)

    def embed(self, ids_NT: torch.Tensor) -> torch.Tensor:
        """Return the input of the first block for token ids [1, T]."""
        self.relay.stops = True
        with suppress(Reached):
            self._run(ids_NT, None)
        self.relay.stops = False
        return packed(self.relay.reached(), self.axes)

    def _run(self, ids_NT: torch.Tensor, give: torch.Tensor | None) -> torch.Tensor:
        self.relay.give = None if give is None else unpacked(give, self.axes)
        with model_code("its head"), matmul_precision(self.device):
            return outputs_of(self.model(**self.inputs(ids_NT.to(self.device))))
