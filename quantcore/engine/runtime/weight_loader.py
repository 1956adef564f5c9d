"""Loads the weights of a model: of one block at a time, or of all that lies around the blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from quantcore.checkpoint.blocks import Blocks
from quantcore.checkpoint.roles import tensors_of_drafts
from quantcore.engine.model.experts import experts_split, stored_singly
from quantcore.engine.model.kinds import (
    Kind,
    language_model,
)
from quantcore.engine.model.parameter_names import (
    FROM_FILE_TO_FILE,
    check_not_rearranged,
    check_shares_nothing,
    place_tensors,
    projection_names,
)
from quantcore.engine.model.regrouping import place_converted
from quantcore.engine.model.skeleton import (
    build_skeleton,
    fill_computed,
    find_block_lists,
    float32_names,
    kind_of,
    set_parameter,
    towers_of,
)
from quantcore.engine.runtime.block_capture import no_chain
from quantcore.engine.runtime.devices import release_freed_memory
from quantcore.engine.runtime.ranks import Ranks, computing_together
from quantcore.engine.runtime.sharded import shard
from quantcore.engine.runtime.shards import is_sharded, local_rows, rows_of
from quantcore.errors import ModelError

ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Shards:
    """The ranks that hold a shard of each block.

    ``read_rows`` returns rows of a float tensor by its checkpoint name.
    """

    ranks: Ranks
    read_rows: Callable[[str, range], torch.Tensor]


@dataclass(frozen=True)
class StoredWeights:
    """A checkpoint: its ``config``, the names of its tensors, and its blocks by these names.

    ``read`` returns a float tensor by its name (CPU). ``expect`` is called with the tensors that the next block will
    read.
    """

    config: dict[str, Any]
    names: set[str]
    blocks: Blocks
    read: ReadTensor
    expect: Callable[[Iterable[str]], None] = lambda names: None


class WeightLoader:
    """The skeleton of a model, and the weights of a part of it in memory at a time.

    The model's own names may differ from those of the checkpoint. With ``shards`` several ranks share every block that
    is loaded. ``kind`` says what the model computes; ``reader`` is the part of it that reads tokens.
    """

    def __init__(
        self, stored: StoredWeights, dtype: torch.dtype, device: torch.device, shards: Shards | None = None
    ) -> None:
        raw_config, names, blocks = stored.config, stored.names, stored.blocks
        self.checkpoint = stored
        self._read = stored.read
        self._expect = stored.expect
        self._shards = shards
        self.device = device
        self.dtype = dtype
        self.model, self.kind = build_skeleton(raw_config, dtype), kind_of(raw_config)
        self.reader = language_model(self.model, self.kind)
        self._head: nn.Module | None = self.reader.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.draft_names = tensors_of_drafts(names, blocks)
        self._placed, self._assembled = place_converted(self.model, names, place_tensors(self.model, names))
        self._stored = {place: name for name, place in self._placed.items()}
        for place, source in self.model.all_tied_weights_keys.items():  # of a tied pair either may be stored
            if place in self._stored:
                self._stored.setdefault(source, self._stored[place])
        self._places, self._lists = find_block_lists(self.model, self._placed, blocks)
        check_shares_nothing(self.model, self._places)
        if blocks.take_turns:
            lists = " and ".join(f"'{prefix}*'" for prefix in blocks.prefixes)
            raise no_chain(f"its blocks alternate between the lists {lists}")
        if self.kind is Kind.speech and len(self._lists) > 1:
            raise ModelError(
                "The encoder of this model takes audio, not embeddings of tokens: text cannot drive it.",
                code="unsupported_architecture",
                hint=FROM_FILE_TO_FILE,
            )
        self._towers = towers_of(self.model, self._places)
        check_not_rearranged(self.model, names, self._placed, self._assembled, self._towers)
        self._projections = projection_names(self.model)
        self._keeps_float32 = float32_names(self.model, dtype)
        for name, buffer in list(self.model.named_buffers()):
            if name in self._stored:
                self._load(self.model, name, name)
            else:
                set_parameter(self.model, name, buffer.to(device))

    @property
    def num_shards(self) -> int:
        """The number of ranks that share each block; 1 if every rank holds whole blocks."""
        return 1 if self._shards is None else self._shards.ranks.size

    @property
    def num_blocks(self) -> int:
        return len(self._places)

    def block_name(self, index: int) -> str:
        """Return the name of the module of block ``index``."""
        return self._places.prefix_of(index).removesuffix(".")

    @property
    def starts(self) -> list[int]:
        """The numbers of the first blocks: 0, and that of a decoder behind its encoder."""
        return self._places.starts

    def find_module(self, name: str) -> nn.Module:
        """Return the module of the layer with the checkpoint's ``name``; inside a block, only while that is loaded.

        Raises ModelError if the model has no place for it.
        """
        place = self._placed.get(f"{name}.weight")
        if place is None:
            raise ModelError(
                f"Transformers builds this model without the layer {name}.",
                code="unsupported_layer",
                hint=f"Exclude it by name: '{name}'.",
            )
        return self.model.get_submodule(place.rpartition(".")[0])

    @contextmanager
    def reading(self, read: Callable[[str], torch.Tensor]) -> Iterator[None]:
        """Read the tensors of the checkpoint by ``read`` while this lasts."""
        before, self._read = self._read, read
        try:
            yield
        finally:
            self._read = before

    def stored_name(self, name: str, index: int | None = None) -> str:
        """Return the checkpoint's name of a parameter of the model, or of one of block ``index``."""
        place = name if index is None else f"{self._places.prefix_of(index)}{name}"
        return self._stored.get(place, place)

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """Yield block ``index`` with its weights in memory; they are dropped at the end."""
        prefix = self._places.prefix_of(index)
        kept = self.model.get_submodule(self.block_name(index))
        if self._shards is not None:  # sharding cannot be undone: use a copy of the block that is dropped later
            self.model.set_submodule(self.block_name(index), deepcopy(kept))
        block = self.model.get_submodule(self.block_name(index))
        with experts_split(block, stored_singly(block, prefix, self._stored), self._projections):
            if self._shards is not None:
                keeps = lambda name: self._keeps_float32(prefix + name)  # noqa: E731
                shard(block, self._shards.ranks, self.device, keeps)
            names = [name for name, _ in block.named_parameters()]
            try:
                for name in names:
                    self._load(block, name, prefix + name)
                self._expect(self._stored_in_block(index + 1))
                with nullcontext() if self._shards is None else computing_together():
                    yield block
            finally:
                self.model.set_submodule(self.block_name(index), kept)
                if block is kept:
                    self._drop(block, names)
                del block
        release_freed_memory()

    @property
    def matrix_of_head(self) -> str | None:
        """The checkpoint's name of the weight [V, H] that gives the logits; None without one that is stored alone."""
        place = next((f"{name}.weight" for name, module in self.model.named_modules() if module is self._head), "")
        return self._stored.get(place, self._stored.get(self.model.all_tied_weights_keys.get(place, "")))

    def _stored_in_block(self, index: int) -> list[str]:
        if index == self.num_blocks:
            return []
        start = self._places.prefix_of(index)
        return [name for place, name in self._stored.items() if place.startswith(start)]

    @contextmanager
    def outside_loaded(self, *, head: bool, with_matrices: bool = True) -> Iterator[None]:
        """Hold the weights outside the blocks in memory: the head only if ``head``, a tower's only once it runs.

        Without ``with_matrices`` the weights of embeddings and of the head are NaN.
        """
        every = self.model.named_parameters(remove_duplicate=False)  # each name, also of those that are tied by now
        names = [name for name, _ in every if not name.startswith(self._places.prefixes)]
        if not head:
            sources = self.model.all_tied_weights_keys
            names = [name for name in names if not self._is_stored_head(sources.get(name, name))]
        prefixes = tuple(f"{tower}." for tower in self._towers)
        holes = {name for name in names if name.startswith(prefixes) or (not with_matrices and self._is_matrix(name))}
        at_once = [name for name in names if name not in holes]
        with ExitStack() as stack:
            stack.callback(self._drop, self.model, names)
            for name in at_once:
                if name in self._stored or name in self._assembled:
                    self._load(self.model, name, name)
            self.model.tie_weights(recompute_mapping=False)
            for name in at_once:
                if self.model.get_parameter(name).is_meta:
                    self._fill_missing(name)
            for name in holes:  # some models take their device from a tower
                parameter = self.model.get_parameter(name)
                dtype = torch.float32 if self._keeps_float32(name) else parameter.dtype
                hole = torch.full((), math.nan, dtype=dtype, device=self.device)
                set_parameter(self.model, name, hole.expand(parameter.shape))
            for name, tower in self._towers.items():
                stack.callback(tower.register_forward_pre_hook(partial(self._load_tower, name)).remove)
            yield

    def _is_matrix(self, name: str) -> bool:
        """Return True for the weight of an embedding or of the head."""
        module = self.model.get_submodule(name.rpartition(".")[0])
        return name.endswith(".weight") and (module is self._head or isinstance(module, nn.Embedding))

    def _fill_missing(self, name: str) -> None:
        """Fill a parameter that is not stored: it is that of another module, or a table that the model's code makes."""
        source = self.model.all_tied_weights_keys.get(name)
        if source is not None and not (parameter := self.model.get_parameter(source)).is_meta:
            set_parameter(self.model, name, parameter)
        elif source in self._stored:  # of a tower, which is not loaded yet
            self._load(self.model, name, source)
        elif not fill_computed(self.model, name, self.device):
            self._load(self.model, name, name)  # let ``read`` raise the error

    def _load_tower(self, name: str, tower: nn.Module, _: tuple[Any, ...]) -> None:
        for part, parameter in list(tower.named_parameters()):
            place = f"{name}.{part}"
            if any(parameter.stride()):  # no hole
                continue
            if place in self._stored or place in self._assembled:
                self._load(self.model, place, place)
            else:
                self._fill_missing(place)

    def _is_stored_head(self, name: str) -> bool:
        """Return True for a parameter of an output projection with its own weight."""
        path = name.rpartition(".")[0]
        return f"{path}.weight" in self._stored and self.model.get_submodule(path) is self._head

    def _load(self, module: nn.Module, name: str, place: str) -> None:
        """Fill the parameter ``name`` of ``module``, whose name in the whole model is ``place``."""
        path, _, last = name.rpartition(".")
        stored = self._stored.get(place, place)
        before = getattr(module.get_submodule(path), last)
        if self._shards is not None and is_sharded(before):
            local_rows(before).copy_(self._shards.read_rows(stored, rows_of(before)))
            return
        dtype = torch.float32 if self._keeps_float32(place) else before.dtype
        value = self._assembled[place].read(place, self._read) if place in self._assembled else self._read(stored)
        set_parameter(module, name, value.to(self.device, dtype, non_blocking=True))  # waits unless it is pinned

    def _drop(self, module: nn.Module, names: list[str]) -> None:
        for name in names:
            set_parameter(module, name, torch.empty_like(module.get_parameter(name), device="meta"))
