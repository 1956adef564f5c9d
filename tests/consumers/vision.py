"""Images of two halves in two colours, the question about them, and the right answer.

Importing this makes torchvision importable, which lies beside vLLM's environment (see ``make consumers``): vLLM's
models that see need it. On PyPI it is compiled for CUDA alone, and does not load beside a torch for the CPU until the
operators exist whose shapes it describes. Nothing here runs them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 220), "white": (230, 230, 230)}
SIDE = 112
QUESTION = "Which colours?"

BESIDE = Path(sys.prefix) / "share" / "torchvision"
if BESIDE.exists():
    sys.path.append(str(BESIDE))
    try:
        torch.ops.load_library(BESIDE / "torchvision" / "_C.so")
    except OSError:
        OPERATORS = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def image(left: str, right: str, *, generator: torch.Generator | None = None) -> Image.Image:
    """Return an image whose left half has one colour and whose right half the other; noisy with a ``generator``."""
    pixels = torch.empty(SIDE, SIDE, 3)
    pixels[:, : SIDE // 2], pixels[:, SIDE // 2 :] = torch.tensor(COLOURS[left]), torch.tensor(COLOURS[right])
    if generator is not None:
        pixels += 20 * torch.randn(1, 1, 3, generator=generator) + 10 * torch.randn(SIDE, SIDE, 3, generator=generator)
    return Image.fromarray(pixels.clamp(0, 255).numpy().astype(np.uint8))


def save_rows(folder: Path, num_rows: int) -> None:
    """Write chats about noisy images of colours drawn at random: three quarters to ``learn.jsonl``, ``held.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, names = torch.Generator().manual_seed(7), list(COLOURS)
    rows = []
    for number, pair in enumerate(torch.randint(len(names), (num_rows, 2), generator=generator).tolist()):
        halves = [names[place] for place in pair]
        image(*halves, generator=generator).save(folder / f"{number}.png")
        question = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": QUESTION}]
        said = [{"type": "text", "text": answer(*halves).strip()}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
        rows.append(json.dumps({"messages": messages}) + "\n")
    border = num_rows * 3 // 4
    (folder / "learn.jsonl").write_text("".join(rows[:border]))
    (folder / "held.jsonl").write_text("".join(rows[border:]))


def answer(left: str, right: str) -> str:
    return f" {left} and {right}"


def prompt(processor: Any) -> str:
    """Return the question about an image as the processor's chat template writes it."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return text
