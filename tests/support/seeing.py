"""Tiny random models that see or hear, with real processors, and data with images or sound for them."""

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from quantcore.engine.model.tiny_model import build_tiny_model
from tests.support.tokenizers import save_byte_tokenizer
from tests.sweep.classes import find_class, small_config

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
TOKENS = ("<image>", "<start_of_image>", "<end_of_image>", "<fake_token_around_image>", "<end_of_utterance>")
SIZE = 56


def llava(tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], Any]:
    size = {"height": SIZE, "width": SIZE}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=template,
    )  # fmt: skip
    image = tokenizer.convert_tokens_to_ids("<image>")
    return {"image_token_index": image, "vision_config": {"image_size": SIZE, "patch_size": 14}}, processor


def gemma3(tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], Any]:
    images = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    template = TEMPLATE.replace("IMAGE", TOKENS[1])
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(
        ("image_token_index", "boi_token_index", "eoi_token_index"), TOKENS, strict=False)}  # fmt: skip
    return tokens | {"mm_tokens_per_image": 4, "vision_config": {"image_size": 64, "patch_size": 16}}, processor


def idefics3(tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], Any]:
    images = Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=template)
    image = tokenizer.convert_tokens_to_ids("<image>")
    return {"image_token_id": image, "vision_config": {"image_size": 64, "patch_size": 32}}, processor


def qwen2_audio(tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], Any]:
    sounds = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=1)
    template = TEMPLATE.replace("'image'", "'audio'").replace("IMAGE", "<image>")
    processor = transformers.Qwen2AudioProcessor(sounds, tokenizer, chat_template=template, audio_token="<image>")
    sound = tokenizer.convert_tokens_to_ids("<image>")
    return {"audio_token_index": sound, "audio_config": {"max_source_positions": 50}}, processor


FAMILIES = {
    "LlavaForConditionalGeneration": llava,
    "Gemma3ForConditionalGeneration": gemma3,
    "Idefics3ForConditionalGeneration": idefics3,
    "Qwen2AudioForConditionalGeneration": qwen2_audio,
}


def save_seeing_model(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a tiny model of the class ``name``, with its processor."""
    folder.mkdir(parents=True, exist_ok=True)
    save_byte_tokenizer(folder)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens([AddedToken(token, special=True) for token in TOKENS])
    end = inner.id_to_token(0)
    names = {"image_token": TOKENS[0], "boi_token": TOKENS[1], "eoi_token": TOKENS[2]}  # as Gemma's has them
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, pad_token=end, extra_special_tokens=names
    )
    changes, processor = FAMILIES[name](tokenizer)
    config = small_config(find_class(name))
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    model = build_tiny_model(config, 0, getattr(transformers, name))
    model.to(dtype).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def image(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (40 + number % 3 * 10, 50, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save_sound(path: Path, number: int) -> None:
    samples = np.random.default_rng(number).integers(-9999, 9999, 6400 + number % 3 * 1600, dtype=np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())


def save_rows(folder: Path, num_rows: int, *, words: int = 12, kind: str = "image") -> Path:
    """Write rows that ask about an image each, or about a sound; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(num_rows):
        name = f"{number}.png" if kind == "image" else f"{number}.wav"
        image(number).save(folder / name) if kind == "image" else save_sound(folder / name, number)
        question = [{"type": kind, kind: name}, {"type": "text", "text": f"What is in {number}?"}]
        answer = " ".join(f"word{(number * 7 + place) % 23}" for place in range(words))
        turns = {"user": question, "assistant": [{"type": "text", "text": answer}]}
        rows.append(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns.items()]}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def save_whisper(folder: Path) -> Path:
    """Write a tiny Whisper in float32, whose tokens before a transcript are 5 (the decoder's start), 6 and 7."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "WhisperForConditionalGeneration"
    config = small_config(find_class(name)) | {"decoder_start_token_id": 5}
    build_tiny_model(config, 0, getattr(transformers, name)).to(torch.float32).save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=config["num_mel_bins"]).save_pretrained(folder)
    save_byte_tokenizer(folder)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = {number: inner.id_to_token(number) for number in (5, 6, 7, 0)}
    inner.post_processor = processors.TemplateProcessing(
        single=" ".join([*(names[number] for number in (5, 6, 7)), "$A", names[0]]),
        special_tokens=[(token, number) for number, token in names.items()],
    )
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=names[0], pad_token=names[0]).save_pretrained(folder)
    return folder


def save_transcripts(folder: Path, num_rows: int) -> Path:
    """Write rows of text with their sound; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(num_rows):
        save_sound(folder / f"{number}.wav", number)
        rows.append(json.dumps({"text": f"these are the words of number {number}. ", "audio": f"{number}.wav"}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"
