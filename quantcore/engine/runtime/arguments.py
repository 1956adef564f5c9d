"""Arguments of a decoder block in addition to the hidden states: masks, RoPE tables, token ids, per-layer inputs.

Some are the same for every window, others are not (DeepSeek-V4's blocks read token ids, Gemma 4's read their own
embeddings, and blocks that share keys and values pass them on in a mapping). So they are kept for every window, and
stored once if windows agree. Some are values that an earlier block returns beside its hidden states, such as the
position bias of T5: ``PassedOn`` stands for one.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch


@dataclass
class Arguments:
    """The positional and named arguments of one call of a block after the hidden states.

    A block that ``is_skipped`` gets none: text alone does not reach the cross-attention blocks of Llama 3.2 Vision.
    ``added`` is what the model adds to the hidden states in front of the block, in the shape of these: Qwen3-VL adds
    features of images there (DeepStack, arXiv:2406.04334).
    """

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    is_skipped: bool = False
    added: torch.Tensor | None = None


@dataclass(frozen=True)
class PassedOn:
    """Stands for the value number ``place`` that block ``index`` returns, where it is an argument of later blocks."""

    index: int
    place: int


@cache
def passed_on(index: int, place: int) -> PassedOn:
    """Return the one ``PassedOn`` of that value: arguments of windows are compared by identity."""
    return PassedOn(index, place)


@dataclass
class WindowArguments:
    """The arguments of every block for every window: ``of_window[window][block]``.

    ``passed[window]`` has the values that blocks have returned for later ones. A model of two lists of blocks has the
    arguments of one list at a time, whose first block has the number ``start``.
    """

    of_window: list[list[Arguments]] = field(default_factory=list)
    start: int = 0
    passed: list[dict[PassedOn, Any]] = field(default_factory=list)
    _awaited: set[PassedOn] = field(default_factory=set)
    _mappings: list[tuple[MutableMapping[Any, Any], int]] = field(default_factory=list)  # with their sizes when kept

    def add(self, recorded: Sequence[Arguments]) -> None:
        """Record the arguments of the next window for all blocks.

        Values equal to the first window's are stored once.
        """
        firsts = self.of_window[0] if self.of_window else recorded
        kept = _Kept()
        self._append([kept.arguments(*pair) for pair in zip(recorded, firsts, strict=True)], {})

    def of(self, index: int, window: int) -> Arguments:
        """Return the arguments of block ``index`` for ``window``, with the values that earlier blocks passed on."""
        arguments, passed = self.of_window[window][index - self.start], self.passed[window]
        if not passed:
            return arguments

        def value(part: Any) -> Any:
            return passed[part] if isinstance(part, PassedOn) else part

        named = {name: value(part) for name, part in arguments.named.items()}
        return replace(arguments, positional=tuple(map(value, arguments.positional)), named=named)

    def note_output(self, index: int, window: int, output: Sequence[Any]) -> None:
        """Keep the values of ``output``, a block's, that later blocks get; those that windows agree in only once."""
        for part in self._awaited:
            if part.index == index:
                value = output[part.place]
                value = value.detach() if isinstance(value, torch.Tensor) else value
                self.passed[window][part] = _Kept().value(value, self.passed[0].get(part) if window else None)

    def copy(self) -> WindowArguments:
        """Copy the arguments for another stream of the same windows, with its own mappings."""
        other = WindowArguments()
        for window, passed in zip(self.of_window, self.passed, strict=True):
            other._append(_with_own_mappings(window), dict(passed))
        other.start = self.start
        return other

    def only(self, window: int) -> WindowArguments:
        """Copy the arguments of one window, with its own mappings."""
        other = WindowArguments()
        other._append(_with_own_mappings(self.of_window[window]), dict(self.passed[window]))
        other.start = self.start
        return other

    @property
    def pass_values_on(self) -> bool:
        """True if a block has left values for later blocks, such as keys and values in a mapping, or returned them."""
        return bool(self._awaited) or any(len(mapping) != size for mapping, size in self._mappings)

    def _append(self, window: list[Arguments], passed: dict[PassedOn, Any]) -> None:
        if not self.of_window:  # what blocks get from earlier ones is the same in every window
            values = (value for arguments in window for value in _values(arguments))
            self._awaited = {value for value in values if isinstance(value, PassedOn)}
        self.of_window.append(window)
        self.passed.append(passed)
        mappings = {id(mapping): mapping for mapping in _mappings(window)}
        self._mappings += [(mapping, len(mapping)) for mapping in mappings.values()]


class _Kept:
    """The values of one window: an object that several blocks get is processed once and stays one object."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}  # the value is held: an id is only unique while its object lives

    def arguments(self, recorded: Arguments, first: Arguments) -> Arguments:
        positional = self.value(recorded.positional, first.positional)
        named = {name: self.value(value, first.named.get(name)) for name, value in recorded.named.items()}
        is_same = positional is first.positional and named.keys() == first.named.keys()
        is_same = is_same and recorded.is_skipped == first.is_skipped and recorded.added is first.added
        if is_same and all(value is first.named[name] for name, value in named.items()):
            return first
        return replace(recorded, positional=positional, named=named)

    def value(self, value: Any, first: Any) -> Any:
        """Return ``first`` if ``value`` equals it and no block can change it, else ``value``.

        A part of a tensor is copied.
        """
        if isinstance(value, (torch.Tensor, MutableMapping, tuple, list)):
            if id(value) not in self._kept:
                self._kept[id(value)] = value, self._new(value, first)
            return self._kept[id(value)][1]
        return value

    def _new(self, value: Any, first: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _tensor(value, first)
        if isinstance(value, MutableMapping):
            own = copy(value)
            for key in value:
                own[key] = self.value(value[key], first.get(key) if isinstance(first, MutableMapping) else None)
            return own
        before = first if type(first) is type(value) and len(first) == len(value) else [None] * len(value)
        parts = [self.value(part, other) for part, other in zip(value, before, strict=True)]
        if all(part is other for part, other in zip(parts, before, strict=True)) and type(first) is type(value):
            return first
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _tensor(value: torch.Tensor, first: Any) -> torch.Tensor:
    if isinstance(first, torch.Tensor) and _equal(value, first):
        return first
    is_part = value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_part else value


def _equal(value: torch.Tensor, first: torch.Tensor) -> bool:
    if value is first:
        return True
    alike = (value.shape, value.dtype, value.device) == (first.shape, first.dtype, first.device)
    return alike and torch.equal(value, first)


def _values(arguments: Arguments) -> tuple[Any, ...]:
    return (*arguments.positional, *arguments.named.values())


def _mappings(window: Sequence[Arguments]) -> list[MutableMapping[Any, Any]]:
    values = (value for arguments in window for value in _values(arguments))
    return [value for value in values if isinstance(value, MutableMapping)]


def _with_own_mappings(window: Sequence[Arguments]) -> list[Arguments]:
    """Return the arguments with copies of the mappings; a mapping that several blocks hold is copied once."""
    own = {id(mapping): copy(mapping) for mapping in _mappings(window)}
    if not own:
        return list(window)
    return [
        replace(
            arguments,
            positional=tuple(own.get(id(value), value) for value in arguments.positional),
            named={name: own.get(id(value), value) for name, value in arguments.named.items()},
        )
        for arguments in window
    ]
