"""Sizes of what algorithms hold for the layers of a block, from their shapes only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from quantcore.checkpoint.blocks import Blocks
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.layout import TensorHeader
from quantcore.config.algorithms import RTNConfig, SolverConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.export.gguf.tensor_names import has_own_layout
from quantcore.plan.workload import SOLVED_ROWS, count_coupled

OUTPUTS = ("o_proj", "out_proj", "down_proj", "c_proj", "dense", "wo", "w2", "fc2")
"""Names of layers that read the output of the other layers of their module, at any width."""

Input = tuple[str, int, bool]


def values_beside(layers: Sequence[LayerPlan], tensors: Mapping[str, TensorHeader]) -> int:
    """Return the number of values that blocks get for each token in addition to the hidden states.

    Names show them: the per-layer inputs of Gemma 3n and 4, and the keys and values that two kinds of their blocks
    leave for later ones.
    """
    per_layer = [tensor.shape[1] for name, tensor in tensors.items() if name.endswith("embed_tokens_per_layer.weight")]
    keys = [layer.out_features for layer in layers if layer.name.endswith(".k_proj")]
    return sum(per_layer) + 4 * max(keys, default=0) * bool(per_layer)


def grams_of(config: Config, layers: Sequence[LayerPlan]) -> tuple[int, int]:
    """Return the bytes of matrices [I, I]: all of the block that has most of them, and those of the widest input."""
    count = max((algorithm.num_grams for algorithm in config.algo_config if algorithm.needs_calibration), default=0)
    inputs: dict[int | None, set[Input]] = {}
    for layer in layers:
        inputs.setdefault(layer.block, set()).add(input_of(layer))
    squares = [sum(width * width for _, width, _ in of_block) for of_block in inputs.values()]
    element = _bytes_of_moments(config)
    return count * element * max(squares), count * element * max(layer.in_features for layer in layers) ** 2


def _bytes_of_moments(config: Config) -> int:
    return 8 if any(getattr(algorithm, "hessian_dtype", "") == "float64" for algorithm in config.algo_config) else 4


def most_weights(layers: Sequence[LayerPlan]) -> int:
    """Return the number of weights to round in the block that has most of them."""
    sums: Counter[int | None] = Counter()
    for layer in layers:
        sums[layer.block] += math.prod(layer.shape)
    return max(sums.values())


def outputs_of(layers: Sequence[LayerPlan]) -> int:
    """Return the bytes of the second moments of all outputs of a block, for the block with most of them."""
    sums: Counter[int | None] = Counter()
    for layer in layers:
        sums[layer.block] += 4 * count_coupled(layer.out_features)
    return max(sums.values())


def coupled_of(layers: Sequence[LayerPlan]) -> int:
    """Return the bytes of the factors of these moments, and of the errors, for the layers of one input."""
    sums: Counter[tuple[int | None, Input]] = Counter()
    for layer in layers:
        sums[layer.block, input_of(layer)] += 2 * 4 * (count_coupled(layer.out_features) + math.prod(layer.shape))
    return max(sums.values())


def solved_of(config: Config, layers: Sequence[LayerPlan], element: int) -> tuple[int, int]:
    """Return the bytes needed to solve the costliest input of a block: of further matrices, and of its layers.

    Those of the layers are the weights, their codes (a byte each), their targets if those differ from the weights, and
    the rows that are being solved.
    """
    solver = next((entry for entry in config.algo_config if isinstance(entry, SolverConfig)), RTNConfig())
    rows: Counter[tuple[int | None, Input]] = Counter()
    for layer in layers:
        rows[layer.block, input_of(layer)] += layer.out_features
    whole = element + 1 + 4 * config.compares
    costs = (
        (
            solver.num_factors * _bytes_of_moments(config) * width**2,
            width * (whole * height + 4 * solver.row_copies * min(height, SOLVED_ROWS)),
        )
        for (_, (_, width, _)), height in rows.items()
    )
    return max(costs, key=sum)


def input_of(layer: LayerPlan) -> Input:
    """Return the key shared by layers of a block that read the same input, judged by names and widths."""
    parent, _, name = layer.name.rpartition(".")
    return parent, layer.in_features, name in OUTPUTS


def vocab_size_of(tensors: Mapping[str, TensorHeader], blocks: Blocks) -> int:
    """Return the rows of the largest matrix around the blocks, which is the embedding or the head."""
    around = [tensor for name, tensor in tensors.items() if not name.startswith(blocks.prefixes)]
    return max((tensor.shape[0] for tensor in around if len(tensor.shape) == 2), default=0)


def laid_out_of(exports: Sequence[str], headers: ModelHeaders) -> int:
    """Return the bytes in float32 of the largest tensor that llama.cpp's converter lays out; 0 if it lays out none."""
    if "gguf" not in exports or has_own_layout(headers.config):
        return 0
    shapes = (tensor.shape if tensor.stack is None else tensor.stack.shape for tensor in headers.tensors.values())
    return 4 * max(map(math.prod, shapes))
