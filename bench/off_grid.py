"""``python -m bench.off_grid MODEL OUT``: a copy of a model that computes the same, whose weights lie on no grid.

Models that come as packages were often made from a file of 4 bits, and their weights still lie on its levels. A scheme
with the same levels loses nothing there, and others lose more or less than on a model that was never quantized. This
moves random scales, from 0.8 to 1.25, along the edges of every decoder block
(``quantcore.engine.transforms.mappings``): from norms into the linear layers behind them, from v into o, and from up
into down. In exact arithmetic the function stays as it is. The copy has the dtype of the model: rounding to it changes
a weight by at most 0.4 % in bfloat16, at random.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quantcore.engine.transforms.mappings.discovery import EdgeFinder

LOWEST, HIGHEST = 0.8, 1.25
NUM_TOKENS = 32  # that edges are proven with


def move_off_grid(model: PreTrainedModel, seed: int) -> int:
    """Fold random scales through every edge of the decoder blocks of ``model``, in place; return how many edges."""
    generator = torch.Generator().manual_seed(seed)
    ids_NT = torch.randint(model.config.vocab_size, (1, NUM_TOKENS), generator=generator)
    finder, num_edges = EdgeFinder(), 0
    with torch.no_grad():
        for block, run in _blocks_with_runs(model, ids_NT):
            for edge in finder.find(block, run).edges:
                share = torch.rand(edge.num_scales, generator=generator)
                edge.fold(block, torch.exp(math.log(LOWEST) + share * math.log(HIGHEST / LOWEST)))
                num_edges += 1
    return num_edges


def _blocks_with_runs(model: PreTrainedModel, ids_NT: torch.Tensor) -> list[tuple[nn.Module, Any]]:
    """Return every decoder block with a function that runs it on the states of ``ids_NT`` and returns its update."""
    count = model.config.num_hidden_layers
    blocks = next(each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        for block in blocks
    ]
    model(input_ids=ids_NT, use_cache=False)
    for hook in hooks:
        hook.remove()

    def runs(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        output = block(*args, **kwargs)
        return (output[0] if isinstance(output, tuple) else output) - args[0]

    return [
        (block, lambda block=block, call=call: runs(block, *call)) for block, call in zip(blocks, calls, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a language model of Transformers")
    parser.add_argument("out", type=Path, help="folder for the copy")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    num_edges = move_off_grid(model, options.seed)
    model.save_pretrained(options.out)
    AutoTokenizer.from_pretrained(options.model).save_pretrained(options.out)
    print(f"{num_edges} edges, written to {options.out}")


if __name__ == "__main__":
    main()
