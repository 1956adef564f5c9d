"""A model of which one block is in memory at a time.

The skeleton runs Transformers' own code. Two tricks give us control of its blocks (see ``relay``): while the part
before the blocks runs, each block's ``forward`` is replaced by one that records its arguments; while the part after
the blocks runs, the first block returns the hidden states that we computed. So embedding scales, per-layer masks, RoPE
tables, final norms and logit soft-caps are the model's own, for any architecture. In between an encoder and its decoder
the two tricks meet: the encoder's first block returns what its last one computed, and the decoder's blocks record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quantcore.engine.model.drafts import FIRST, Draft, build_draft
from quantcore.engine.model.experts import experts_split, stored_singly
from quantcore.engine.model.kinds import (
    Kind,
    Media,
    body_of,
    halves,
    inputs_of,
    num_tokens,
    reads_no_media,
)
from quantcore.engine.model.parameter_names import (
    FROM_FILE_TO_FILE,
)
from quantcore.engine.model.skeleton import (
    set_parameter,
)
from quantcore.engine.runtime.arguments import Arguments, WindowArguments
from quantcore.engine.runtime.block_capture import BlockBoundary, NonBlockParts, blocks_replaced, model_code
from quantcore.engine.runtime.devices import release_freed_memory
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.engine.runtime.states import Axes, States, StatesInMemory, packed, unpacked
from quantcore.engine.runtime.weight_loader import Shards, StoredWeights, WeightLoader
from quantcore.errors import ModelError


class StreamedModel(WeightLoader):
    """Runs a model block by block. The arguments are those of ``WeightLoader``."""

    def __init__(
        self, stored: StoredWeights, dtype: torch.dtype, device: torch.device, shards: Shards | None = None
    ) -> None:
        super().__init__(stored, dtype, device, shards)
        self.axes: Axes = (0, 1)
        self._empty_audio: Any = None  # the output of an encoder for silence
        self._num_returned = [0] * len(self._lists)  # values that a block of each list returns as a tuple
        self._passes_on = [True] * len(self._lists)  # see ``BlockBoundary``

    def embed(self, windows_NT: torch.Tensor, states: States | None = None, media: Sequence[Media] = ()) -> Hidden:
        """Return the input of block 0 for token ids [N, T]; it is stored in ``states``, in memory if None.

        ``media`` holds the images and audio of each window; towers run for them. Raises ModelError for ids without an
        embedding in the model, and for media that this model does not read.
        """
        self._check_ids(windows_NT)
        if any(media) and (self.kind not in (Kind.causal, Kind.speech) or self.reader is not self.model):
            raise reads_no_media(self.model)
        hidden = Hidden(StatesInMemory(len(windows_NT)) if states is None else states)
        with self.outside_loaded(head=False):
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
            f"The blocks of this model take hidden states of shape {list(state.shape)} for {num_tokens} tokens "
            "instead of one state per token.",
            code="unsupported_architecture",
            hint=FROM_FILE_TO_FILE,
        )

    def enter(self, index: int, *streams: Hidden | None) -> None:
        """Take ``streams`` from the encoder into the decoder, in place, if block ``index`` is the decoder's first.

        All ranks call it. None means no windows.
        """
        if index not in self.starts[1:]:
            return
        with self.outside_loaded(head=False):
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
            if not media and self._empty_audio is None:
                self._empty_audio = self._encode_audio(sound)
            named["encoder_outputs"] = self._encode_audio(sound) if media else self._empty_audio
        return named

    def _encode_audio(self, sound: torch.Tensor) -> Any:
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
                f"The tokenizer produces the token {largest}, but the model has embeddings for {num_rows} tokens.",
                code="tokenizer_mismatch",
                hint="Put the tokenizer files of this model into its folder.",
            )

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
    def head(self, *, with_matrices: bool = True) -> Iterator[NonBlockParts]:
        """Yield the model around its blocks; the weights of embeddings and head are in memory inside.

        Without ``with_matrices`` they are NaN, which take no memory: see ``vocabulary``.
        """
        with ExitStack() as stack:
            stack.enter_context(self.outside_loaded(head=True, with_matrices=with_matrices))
            for place in range(len(self._lists)):
                relay = stack.enter_context(self._blocks_replaced(place, self._no_arguments(place)))
            yield NonBlockParts(self.reader, relay, self.device, self.kind, self._inputs, self.axes)

    @contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """Yield the model with all of its weights in memory: it computes and generates like Transformers' own."""
        with ExitStack() as stack:
            stack.enter_context(self.outside_loaded(head=True))
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
    def _blocks_replaced(self, place: int, arguments: list[Arguments]) -> Iterator[BlockBoundary]:
        with blocks_replaced(
            self._lists[place],
            arguments,
            num_returned=self._num_returned[place],
            passes_on=self._passes_on[place],
            start=self.starts[place],
        ) as relay:
            try:
                yield relay
            finally:
                self._num_returned[place], self._passes_on[place] = relay.num_returned, relay.passes_on
