"""Rotation as an algorithm of a job (QuaRot, Ashkboos et al. 2024): R1 on the residual stream, R2 on values.

A block is rotated when it is loaded, embeddings and head at the end; hidden states are rotated once, before the first
block. The folding is in ``fold``, the proof that it is valid in ``residual``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quantcore.config.algorithms import RotationConfig
from quantcore.engine.transforms.mappings.record import find_layers
from quantcore.engine.transforms.mappings.scale_pair import FoundEdges, ScalePair, shape_of
from quantcore.engine.transforms.rotation.fold import find_head_sizes, rotate_input, rotate_residual, rotate_values
from quantcore.engine.transforms.rotation.hadamard import Rotation, orthogonal
from quantcore.engine.transforms.rotation.record import Run, has_matrix
from quantcore.engine.transforms.rotation.residual import find_embedding, find_head, find_residual


class ModelRotation:
    """The rotations of a model whose stream has ``width`` channels."""

    def __init__(self, config: RotationConfig, width: int) -> None:
        self._config = config
        self._stream = orthogonal(
            width, seed=config.seed, random_signs=config.random_r1, block_size=config.rotation_size
        )

    def rotate_state(self, state: torch.Tensor) -> torch.Tensor:
        """Apply R1 to hidden states [1, T, H] before the first block, as the rotated blocks read them."""
        return self._stream.apply(state)

    def rotate_block(self, block: nn.Module, run: Run, like: torch.Tensor, edges: Callable[[], FoundEdges]) -> set[str]:
        """Fold the configured rotations into ``block``; returns the names of the changed parameters.

        ``run`` calls the block with hidden states shaped like ``like``. Raises ModelError ``cannot_rotate``.
        """
        changed: set[str] = set()
        if self._config.r1:
            changed.update(rotate_residual(block, find_residual(block, run, like), self._stream))
        if self._config.r2 or self._config.r4:
            all_edges = edges().edges
            heads = dict(zip(all_edges, find_head_sizes(block, all_edges, run, like), strict=True))
            if self._config.r4:
                changed.update(self._rotate_inputs(block, heads))
            for edge, size in heads.items():
                if self._config.r2 and size is not None:
                    changed.update(rotate_values(block, edge, self._of_heads(size)))
        return changed

    def rotate_outside(
        self, model: nn.Module, embed: Callable[[], torch.Tensor], logits: Run, like: torch.Tensor
    ) -> set[str]:
        """Rotate embeddings, final norm and head of ``model``; embeddings and head must not share a weight."""
        if not self._config.r1:
            return set()
        residuals = [find_embedding(model, embed, like.shape[-1]), find_head(model, logits, like)]
        return {name for residual in residuals for name in rotate_residual(model, residual, self._stream)}

    def _rotate_inputs(self, block: nn.Module, heads: dict[ScalePair, int | None]) -> set[str]:
        """Apply R4 to layers that read neither the stream nor values of ``heads``; returns the names of their weights.

        Layers that read the stream follow a norm, or are as wide as the stream.
        """
        others = {
            name
            for edge, size in heads.items()
            for name in edge.consumers
            if size is not None or not has_matrix(block.get_submodule(edge.producer))
        }
        read = {name for edge in heads for name in edge.consumers}
        rotated = set()
        layers = {name: layer for name, layer in find_layers(block).items() if has_matrix(layer)}
        for name, layer in layers.items():
            width = shape_of(layer)[1]
            if name not in others and (name in read or width != self._stream.size):
                rotate_input(block, name, orthogonal(width, block_size=self._config.rotation_size))
                rotated.add(f"{name}.weight")
        return rotated

    def _of_heads(self, size: int) -> Rotation:
        return orthogonal(size, seed=self._config.seed, random_signs=self._config.random_r2)


def untie(model: Any) -> None:
    """Give the output projection of a Transformers ``model`` its own weight if it shares the embedding's."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
