"""Runs in vLLM's environment: train a tiny model to name the colours of an image's two halves, and save it.

usage: make_vision.py FAMILY MODEL_DIR -> one line ``RESULT loss``
       make_vision.py rows FOLDER -> 400 chats about such images, to learn from and held out

The model is saved with its real processor: tokenizer (a token a byte), image processor and chat template.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import vision  # first: it makes torchvision importable
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

BATCH = 18
PATCH = 14
SIDE = vision.SIDE
TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "vocab_size": 320,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257,
}  # fmt: skip
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
TOWER |= {"image_size": SIDE, "patch_size": PATCH}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """``specials``: the tokens behind those of bytes, a text's first and last; ``image``: how a prompt has an image.

    ``renamed``: beginnings of names in what Transformers saves, with those that published checkpoints have.
    """

    specials: tuple[str, ...]
    image: str
    renamed: dict[str, str]
    num_steps: int
    config: dict[str, Any]
    processor: Callable[[PreTrainedTokenizerFast, str], ProcessorMixin]


def llava(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", chat_template=template,
        num_additional_image_tokens=1,
    )  # fmt: skip


def gemma3(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
    images = Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=16)


def qwen(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    images, videos = Qwen2VLImageProcessor(size=size), Qwen2VLVideoProcessor(size=size)
    return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=template)


FAMILIES = {
    "llava": Family(
        ("<image>",),
        "<image>",
        {"vision_tower.": "vision_tower.vision_model."},
        200,
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "clip_vision_model"},
            "image_token_id": 258,
            "image_seq_length": 64,
            "tie_word_embeddings": False,
        },
        llava,
    ),
    "gemma3": Family(
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>", *("\n" * length for length in range(1, 5))),
        "<start_of_image>",
        {"vision_tower.": "vision_tower.vision_model."},
        200,
        {
            "text_config": {**TEXT, "query_pre_attn_scalar": 32, "sliding_window": 64},
            "vision_config": {**TOWER, "vision_use_head": False},
            "mm_tokens_per_image": 16,
            "tie_word_embeddings": True,
            "image_token_id": 258,
            "boi_token_id": 259,
            "eoi_token_id": 260,
        },
        gemma3,
    ),
    "qwen2_5_vl": Family(
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        {},
        450,
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            },
            "vision_config": {
                "hidden_size": 64, "intermediate_size": 128, "depth": 3, "num_heads": 2, "out_hidden_size": 128,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": 258,
            "tie_word_embeddings": True,
            "vision_start_token_id": 259,
            "vision_end_token_id": 260,
            "video_token_id": 261,
        },
        qwen,
    ),
}  # fmt: skip


def byte_tokenizer(specials: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte, then those that begin and end a text, then ``specials``."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>", *specials)])
    named = {"image_token": specials[0]}
    if "<start_of_image>" in specials:
        named |= {"boi_token": specials[1], "eoi_token": specials[2]}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", extra_special_tokens=named
    )


def train(model: torch.nn.Module, processor: ProcessorMixin, num_steps: int) -> float:
    """Teach the answer about all pairs of colours, with noise on the images; return the last loss."""
    generator = torch.Generator().manual_seed(0)
    pairs = list(product(vision.COLOURS, repeat=2))
    prompt = vision.prompt(processor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps)
    for _ in range(num_steps):
        chosen = [pairs[int(i)] for i in torch.randint(len(pairs), (BATCH,), generator=generator)]
        images = [[vision.image(*pair, generator=generator)] for pair in chosen]
        texts = [f"{prompt}{vision.answer(*pair)}</s>" for pair in chosen]
        inputs = processor(images=images, text=texts, return_tensors="pt", padding=True, padding_side="right")
        labels = inputs["input_ids"].clone()
        length = processor(images=images[:1], text=[prompt], return_tensors="pt")["input_ids"].shape[1]
        labels[:, :length] = -100
        ends = (labels == processor.tokenizer.eos_token_id).cumsum(1)
        labels[ends > 1] = -100
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def main() -> None:
    folder = Path(sys.argv[2])
    if sys.argv[1] == "rows":
        vision.save_rows(folder, 400)
        return
    family = FAMILIES[sys.argv[1]]
    processor = family.processor(byte_tokenizer(family.specials), TEMPLATE.replace("IMAGE", family.image))
    processor.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(sys.argv[1], **family.config)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    loss = train(model.train(), processor, family.num_steps)
    model.to(torch.bfloat16).save_pretrained(folder)
    rename(folder / "model.safetensors", family.renamed)
    print(f"RESULT {loss}")


def rename(file: Path, renamed: dict[str, str]) -> None:
    tensors = load_file(file)
    for before, after in renamed.items():
        tensors = {
            after + name.removeprefix(before) if name.startswith(before) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, file, metadata={"format": "pt"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
