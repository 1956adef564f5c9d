"""A model of which one block is in memory at a time.

The skeleton runs Transformers' own code. Two tricks give us control of its blocks (see ``relay``): while the part
before the blocks runs, each block's ``forward`` is replaced by one that records its arguments; while the part after
the blocks runs, the first block returns the hidden states that we computed. So embedding scales, per-layer masks, RoPE
tables, final norms and logit soft-caps are the model's own, for any architecture. In between an encoder and its decoder
the two tricks meet: the encoder's first block returns what its last one computed, and the decoder's blocks record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quantcore.checkpoint.blocks import Blocks
from quantcore.checkpoint.roles import tensors_of_drafts
from quantcore.errors import ModelError
from quantcore.model.drafts import FIRST, Draft, build_draft
from quantcore.model.experts import experts_split, stored_singly
from quantcore.model.kinds import Kind, Media, body_of, halves, inputs_of, language_model, num_tokens, reads_no_media
from quantcore.model.names import (
    FROM_FILE_TO_FILE,
    check_not_rearranged,
    check_shares_nothing,
    place_tensors,
    projection_names,
)
from quantcore.model.regrouping import place_converted
from quantcore.model.skeleton import (
    build_skeleton,
    fill_computed,
    find_block_lists,
    float32_names,
    kind_of,
    set_parameter,
    towers_of,
)
from quantcore.runtime.arguments import Arguments, WindowArguments
from quantcore.runtime.devices import release_freed_memory
from quantcore.runtime.hidden import Hidden
from quantcore.runtime.matmul import matmul_precision
from quantcore.runtime.ranks import Ranks, computing_together
from quantcore.runtime.relay import Outside, Relay, blocks_replaced, model_code, no_chain
from quantcore.runtime.sharded import shard
from quantcore.runtime.shards import is_sharded, local_rows, rows_of
from quantcore.runtime.states import Axes, States, StatesInMemory, packed, unpacked

ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Shards:
    """The ranks that hold a shard of each block.

    ``read_rows`` returns rows of a float tensor by its checkpoint name.
    """

    ranks: Ranks
    read_rows: Callable[[str, range], torch.Tensor]


class StreamedModel:
    """Runs a model block by block. ``read`` returns a float tensor by its checkpoint name (CPU).

    ``names`` are the checkpoint's tensors and ``blocks`` has its names; the model's own names may differ. With
    ``shards`` several ranks share every block that is loaded. ``expect`` is called with the tensors that the next block
    will read. ``kind`` says what the model computes; ``reader`` is the part of it that reads tokens.
    """

    def __init__(
        self, raw_config: dict[str, Any], read: ReadTensor, names: set[str], blocks: Blocks, dtype: torch.dtype,
        device: torch.device, shards: Shards | None = None,
        expect: Callable[[Iterable[str]], None] = lambda names: None,
    ) -> None:  # fmt: skip
        self._read = read
        self._expect = expect
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
            raise no_chain(f"its blocks are in lists that take turns, {lists}")
        if self.kind is Kind.speech and len(self._lists) > 1:
            raise ModelError(
                "The encoder of this model takes sound where others take embeddings of tokens: text cannot run it.",
                code="unsupported_architecture",
                hint=FROM_FILE_TO_FILE,
            )
        self._towers = towers_of(self.model, self._places)
        check_not_rearranged(self.model, names, self._placed, self._assembled, self._towers)
        self._projections = projection_names(self.model)
        self._keeps_float32 = float32_names(self.model, dtype)
        self.axes: Axes = (0, 1)
        self._silence: Any = None  # the output of an encoder that hears nothing
        self._num_returned = [0] * len(self._lists)  # values that a block of each list returns as a tuple
        self._passes_on = [True] * len(self._lists)  # see ``Relay``
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
                hint=f"Exclude it by its name: '{name}'.",
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

    def embed(self, windows_NT: torch.Tensor, states: States | None = None, media: Sequence[Media] = ()) -> Hidden:
        """Return the input of block 0 for token ids [N, T]; it is stored in ``states``, in memory if None.

        ``media`` are those of each window, if any has some: towers run for them. Raises ModelError for ids without an
        embedding in the model, and for media that this model does not read.
        """
        self._check_ids(windows_NT)
        if any(media) and (self.kind not in (Kind.causal, Kind.speech) or self.reader is not self.model):
            raise reads_no_media(self.model)
        hidden = Hidden(StatesInMemory(len(windows_NT)) if states is None else states)
        with self._outside_loaded(head=False):
            for window_T, seen in zip(windows_NT, media or [{}] * len(windows_NT), strict=True):
                self._add_window(hidden, window_T, seen)
            if self._shards is not None:
                hidden.num_idle = max(self._shards.ranks.gather(len(windows_NT))) - len(windows_NT)
                hidden.idle = Hidden([])
                self._add_window(hidden.idle, windows_NT.new_zeros(windows_NT.shape[1]), {})
        return hidden

    def _add_window(self, hidden: Hidden, window_T: torch.Tensor, media: Media) -> None:
        """Add to ``hidden`` the input of the first block for one window of token ids [T] and its media."""
        ids_NT, arguments = window_T[None].to(self.device), self._no_arguments(0)
        with ExitStack() as stack:
            relay = stack.enter_context(self._blocks_replaced(0, arguments))
            for place in range(1, len(self._lists)):
                stack.enter_context(self._blocks_replaced(place, self._no_arguments(place))).stops = True
            run = partial(body_of(self.reader), **self._inputs(ids_NT, media))
            state = relay.run_with_additions(run, arguments) if media else relay.run(run)
        is_half = len(self._lists) == 1 and self.kind is Kind.sequence_to_sequence  # T5Gemma 2: its encoder is a tower
        self.axes = hidden.axes = self._axes_of(state, len(halves(ids_NT)[1][0]) if is_half else len(window_T))
        hidden.states.append(packed(state, self.axes))
        hidden.ids.append(ids_NT)
        hidden.arguments.add(arguments)

    def _axes_of(self, state: torch.Tensor, num_tokens: int) -> Axes:
        """Return the axes of windows and tokens in the hidden states of a window. Raises ModelError for others."""
        if len(self._lists) > 1 and state.ndim == 3 and state.shape[0] == 1:  # an encoder reads a part, and may pad it
            return (0, 1)
        for axes in ((0, 1), (1, 0), (1, 2)) if len(self._lists) == 1 else ():
            if max(axes) < state.ndim - 1 and [state.shape[axis] for axis in axes] == [1, num_tokens]:
                return axes
        raise ModelError(
            f"The blocks of this model take hidden states of shape {list(state.shape)} for {num_tokens} tokens, which"
            " are not a list of states, one for each token.",
            code="unsupported_architecture",
            hint=FROM_FILE_TO_FILE,
        )

    def enter(self, index: int, *streams: Hidden | None) -> None:
        """Take ``streams`` from the encoder into the decoder, in place, if block ``index`` is the decoder's first.

        All ranks call it. None means no windows.
        """
        if index not in self.starts[1:]:
            return
        with self._outside_loaded(head=False):
            for hidden in filter(None, streams):
                self._enter(self.starts.index(index), hidden)
                if hidden.idle is not None:
                    self._enter(self.starts.index(index), hidden.idle)

    def _enter(self, place: int, hidden: Hidden) -> None:
        """Replace the last states of the list before ``place`` by the first ones of that list, with its arguments."""
        before = hidden.states
        hidden.states = before.empty() if isinstance(before, States) else []
        hidden.arguments = WindowArguments(start=self.starts[place])
        for state, ids_NT in zip(before, hidden.ids, strict=True):
            arguments = self._no_arguments(place)
            with (
                self._blocks_replaced(place - 1, self._no_arguments(place - 1)) as encoder,
                self._blocks_replaced(place, arguments) as relay,
            ):
                encoder.give = unpacked(state, self.axes)
                entered = relay.run(partial(body_of(self.reader), **self._inputs(ids_NT)))
                hidden.states.append(packed(entered, self.axes))
            hidden.arguments.add(arguments)

    def _inputs(self, ids_NT: torch.Tensor, media: Media | None = None) -> dict[str, Any]:
        """Return the model's named inputs for token ids; an encoder hears silence once for all windows."""
        here = {name: value.to(self.device) for name, value in (media or {}).items()}
        named = inputs_of(self.reader, self.kind, ids_NT, here)
        if self.kind is Kind.speech:
            sound = named.pop(self.model.main_input_name)
            if not media and self._silence is None:
                self._silence = self._hear(sound)
            named["encoder_outputs"] = self._hear(sound) if media else self._silence
        return named

    def _hear(self, sound: torch.Tensor) -> Any:
        with model_code("its encoder"), torch.no_grad(), matmul_precision(self.device):
            return self.model.get_encoder()(sound)

    def _no_arguments(self, place: int) -> list[Arguments]:
        return [Arguments(is_skipped=True) for _ in self._lists[place]]  # until they are called

    def _check_ids(self, windows_NT: torch.Tensor) -> None:
        with model_code("its embedding"):
            num_rows = num_tokens(self.reader)
        largest = max((int(window_T.max()) for window_T in windows_NT), default=0)
        if largest >= num_rows:
            raise ModelError(
                f"The tokenizer gives the token {largest}, and the model has embeddings of {num_rows} tokens.",
                code="tokenizer_mismatch",
                hint="Put the tokenizer's files that belong to this model into its folder.",
            )

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

    def _stored_in_block(self, index: int) -> list[str]:
        if index == self.num_blocks:
            return []
        start = self._places.prefix_of(index)
        return [name for place, name in self._stored.items() if place.startswith(start)]

    def run_block(self, block: nn.Module, index: int, hidden: Hidden | None) -> None:
        """Take every window one block further, in place; None means no windows."""
        if hidden is None:
            return
        hidden.advance(block, index)
        self.note_returned(index, hidden)

    def note_returned(self, index: int, hidden: Hidden) -> None:
        """Note how many values block ``index`` has returned for ``hidden``."""
        place = sum(start <= index for start in self.starts) - 1
        self._num_returned[place] = hidden.num_returned

    @contextmanager
    def head(self, *, with_matrices: bool = True) -> Iterator[Outside]:
        """Yield the model around its blocks; the weights of embeddings and head are in memory inside.

        Without ``with_matrices`` they are NaN, which take no memory: see ``vocabulary``.
        """
        with ExitStack() as stack:
            stack.enter_context(self._outside_loaded(head=True, with_matrices=with_matrices))
            for place in range(len(self._lists)):
                relay = stack.enter_context(self._blocks_replaced(place, self._no_arguments(place)))
            yield Outside(self.reader, relay, self.device, self.kind, self._inputs, self.axes)

    @property
    def matrix_of_head(self) -> str | None:
        """The checkpoint's name of the weight [V, H] that gives the logits; None without one that is stored alone."""
        place = next((f"{name}.weight" for name, module in self.model.named_modules() if module is self._head), "")
        return self._stored.get(place, self._stored.get(self.model.all_tied_weights_keys.get(place, "")))

    @contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """Yield the model with all of its weights in memory: it computes and generates like Transformers' own."""
        with ExitStack() as stack:
            stack.enter_context(self._outside_loaded(head=True))
            for index in range(self.num_blocks):
                stack.enter_context(self.block(index))
                release_freed_memory()
            yield self.reader

    @contextmanager
    def draft(self) -> Iterator[Draft]:
        """Yield the draft layers, with the weights of the first one in memory.

        Embedding and output projection are the model's: they have their weights inside ``head``. Raises ModelError if
        Transformers has no code for them, or if a tensor is missing.
        """
        draft = build_draft(self.reader, self.draft_names)
        stored = {place: name for name, place in draft.placed.items()}
        with experts_split(draft.layer, stored_singly(draft.layer, FIRST, stored), self._projections):
            buffers = [(name, buffer) for name, buffer in draft.layer.named_buffers() if FIRST + name in stored]
            for name, before in [*draft.layer.named_parameters(), *buffers]:
                value = self._read(stored.get(FIRST + name, FIRST + name))
                set_parameter(draft.layer, name, value.to(self.device, before.dtype))
            yield draft

    @contextmanager
    def _outside_loaded(self, *, head: bool, with_matrices: bool = True) -> Iterator[None]:
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

    @contextmanager
    def _blocks_replaced(self, place: int, arguments: list[Arguments]) -> Iterator[Relay]:
        with blocks_replaced(
            self._lists[place], arguments, num_returned=self._num_returned[place], passes_on=self._passes_on[place],
            start=self.starts[place],
        ) as relay:  # fmt: skip
            try:
                yield relay
            finally:
                self._num_returned[place], self._passes_on[place] = relay.num_returned, relay.passes_on

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
