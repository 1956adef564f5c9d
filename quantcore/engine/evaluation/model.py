"""A model to evaluate, float or quantized: run one block at a time, or as a whole to generate text.

Several ranks hold a whole model in shards (FSDP2). They run it in lockstep on the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from quantcore.checkpoint.blocks import find_blocks
from quantcore.checkpoint.shared_cache import find_unused
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.calibration.ranges import Activations, quantized_activations
from quantcore.engine.containers.dequantize import open_source, read_layer
from quantcore.engine.evaluation.clipping import Clipping
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.modules.loading import load_model
from quantcore.engine.runtime.block_capture import NonBlockParts
from quantcore.engine.runtime.devices import default_device
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.ranks import ALONE, Ranks, computing_together
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.engine.runtime.vocabulary import Vocabulary, in_parts
from quantcore.engine.runtime.weight_loader import StoredWeights
from quantcore.importing.model import Model
from quantcore.tensors.source import TORCH_DTYPES, Rows, rows_of

OnProgress = Callable[[int], None]
"""Callback that gets the number of blocks done."""


@dataclass
class EvaluatedModel:
    """A float or quantized model that is run block by block, or as a whole.

    ``read_rows`` reads a matrix by its checkpoint name, some rows at a time. ``layers`` are the quantized ones; a float
    model has none. ``activations`` are the static parameters of their inputs and outputs, which are set when the
    layer's weight is read. If several ``ranks`` hold the model together, each loads ``stored``.
    """

    streamed: StreamedModel
    read_rows: Callable[[str], Rows]
    layers: tuple[LayerPlan, ...] = ()
    activations: dict[LayerPlan, Activations] = field(default_factory=dict)
    has_run: bool = False
    stored: Model | None = None
    ranks: Ranks = ALONE

    @cached_property
    def draft_layers(self) -> frozenset[LayerPlan]:
        """The quantized layers of draft heads, which the model itself does not run."""
        names = set(self.streamed.draft_names)
        return frozenset(layer for layer in self.layers if f"{layer.name}.weight" in names)

    def run(self, hidden: Hidden, told: OnProgress, clipping: Clipping | None = None) -> None:
        """Take ``hidden`` through all blocks; ``clipping`` counts the values that static ranges clip."""
        for index in range(self.streamed.num_blocks):
            self.streamed.enter(index, hidden)
            with self.quantized_block(index, clipping) as block:
                self.streamed.run_block(block, index, hidden)
            told(index + 1)
        self.has_run = True

    @contextmanager
    def quantized_block(self, index: int, clipping: Clipping | None = None) -> Iterator[nn.Module]:
        """Hold a block in memory while this lasts, whose activations are quantized as the files say."""
        with self.streamed.block(index) as block, self._quantized(index, clipping):
            yield block

    def embed(self, text: EvaluationText) -> Hidden:
        """Return the input of the first block; towers that run are quantized as well."""
        with self._quantized(None) if text.media else nullcontext():
            return self.streamed.embed(text.ids_NT, media=text.media)

    def last_states(self, text: EvaluationText, told: OnProgress) -> list[torch.Tensor]:
        """Return the hidden states [1, T, H] behind the last block."""
        hidden = self.embed(text)
        self.run(hidden, told)
        return list(hidden.states)

    def last_states_NTH(self, text: EvaluationText, told: OnProgress) -> torch.Tensor:
        """Return ``last_states`` as one tensor on the host, to be cached."""
        return torch.cat([state.cpu() for state in self.last_states(text, told)])

    @contextmanager
    def head(self) -> Iterator[NonBlockParts]:
        """Yield a function from the states behind the last block to logits."""
        self._run_a_little()
        with self.streamed.head() as logits, self._quantized(None):
            yield logits

    @contextmanager
    def vocabulary(self, like: torch.Tensor) -> Iterator[Vocabulary]:
        """Yield the same in parts of the vocabulary, whose weights are read one after the other, if its code allows it.

        ``like``: hidden states [1, T, H] behind the last block.
        """
        self._run_a_little()
        name = self.streamed.matrix_of_head
        if name is not None:
            rows = self.read_rows(name)  # that of codes sets the layer's activations
            with self.streamed.head(with_matrices=False) as logits, self._quantized(None):
                vocabulary = in_parts(logits, like, rows)
                if vocabulary.parts:
                    yield vocabulary
                    return
        with self.head() as logits:
            yield Vocabulary(logits)

    def _run_a_little(self) -> None:
        """Let the model note whether its blocks return tuples, which only a run shows."""
        if self.has_run:
            return
        hidden = self.streamed.embed(torch.zeros(1, 2, dtype=torch.long))
        for start in self.streamed.starts:
            self.streamed.enter(start, hidden)
        self.has_run = True

    @contextmanager
    def draft(self) -> Iterator[MtpModel]:
        """Hold the first layer for multi-token prediction in memory while this lasts; see ``StreamedModel.draft``."""
        with self.streamed.draft() as draft:
            found = {layer: draft.find_module(layer.name) for layer in self.draft_layers}
            modules = {layer: module for layer, module in found.items() if module is not None}
            with quantized_activations(modules, self.activations, draft.model):
                yield draft.model

    @contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """Hold all weights in memory while this lasts, so that the model can generate."""
        if self.stored is not None and self.ranks.size > 1:
            with computing_together():
                yield load_model(self.stored, self.ranks).model
            return
        with (
            self.streamed.whole() as model,  # in it experts have modules of their own
            quantized_activations(self._modules(self.layers), self.activations, model),
        ):
            yield model

    @contextmanager
    def _quantized(self, index: int | None, clipping: Clipping | None = None) -> Iterator[None]:
        modules = self._modules(tuple(layer for layer in self.layers if layer.block == index))
        watched = Clipping() if clipping is None else clipping
        model = self.streamed.model
        with (
            watched.watching(modules, self.activations, model),
            quantized_activations(modules, self.activations, model),
        ):
            yield

    def _modules(self, layers: tuple[LayerPlan, ...]) -> dict[LayerPlan, nn.Module]:
        return {layer: self.streamed.find_module(layer.name) for layer in layers if layer not in self.draft_layers}


def open_model(model: Model, ranks: Ranks = ALONE) -> EvaluatedModel:
    """Open a model folder, float or quantized, whichever program wrote it. The ``ranks`` share a whole model."""
    headers, source = model.headers, open_source(model)
    layers = {} if model.quantized is None else model.quantized.layers
    activations: dict[LayerPlan, Activations] = {}

    def read(name: str) -> torch.Tensor:
        layer = layers.get(name)
        if layer is not None and layer.config.needs_calibration:
            assert model.quantized is not None
            parts = read_layer(model.quantized, layer)
            activations[layer] = Activations(parts.inputs, parts.outputs)
        return source.read(name)

    def read_rows(name: str) -> Rows:
        return rows_of(read(name)) if name in layers else source.rows(name)

    blocks = find_blocks(headers.tensors, headers.config)
    stored = StoredWeights(headers.config, set(headers.tensors), blocks, read)
    streamed = StreamedModel(stored, TORCH_DTYPES[headers.main_dtype], default_device())
    unused = find_unused((layer.name for layer in layers.values()), headers.config, blocks)
    run = tuple(layer for layer in layers.values() if layer.name not in unused)
    return EvaluatedModel(streamed, read_rows, run, activations, stored=model, ranks=ranks)
