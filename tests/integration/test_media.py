"""Models that see or hear are calibrated and measured with images and sound, and compute what Transformers does."""

import base64
import json
import re

import pytest
import torch
import transformers
from PIL import Image

from quantcore.config import presets
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.commands.evaluate import evaluate
from quantcore.engine.data import media as media_reader
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.samples import QUESTIONS
from quantcore.engine.evaluation.text import read_text
from quantcore.engine.model.kinds import decoder_inputs
from quantcore.engine.model.tiny_model import build_tiny_model
from quantcore.engine.pipeline import job
from quantcore.errors import CalibrationError, QuantError
from quantcore.importing.model import read_model
from tests.support.models import tiny_model
from tests.support.params import with_rare
from tests.support.proofs import proving_here
from tests.support.seeing import FAMILIES, image, save_rows, save_seeing_model, save_transcripts, save_whisper
from tests.support.tokenizers import save_byte_tokenizer
from tests.sweep.classes import find_class, small_config

LLAVA, QWEN_AUDIO = "LlavaForConditionalGeneration", "Qwen2AudioForConditionalGeneration"
SEQ_LEN = 192
GPTQ = presets.resolve("w4a16", group_size=8).to_dict() | {"algo_config": [{"name": "gptq"}]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a tiny model of a class on the first request; return its folder."""
    folder = tmp_path_factory.mktemp("models")

    def save_once(name):
        return folder / name if (folder / name).exists() else save_seeing_model(folder / name, name, torch.float32)

    return save_once


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return save_rows(tmp_path_factory.mktemp("data"), 40)


@pytest.fixture(scope="module")
def rows_for(rows, tmp_path_factory):
    sounds = save_rows(tmp_path_factory.mktemp("sounds"), 40, kind="audio")
    return lambda name: sounds if name == QWEN_AUDIO else rows


def task_of(model, source, output, *, seq_len=SEQ_LEN, config=GPTQ, export="fake_quantized"):
    evaluation = {"num_windows": 2, "seq_len": seq_len, "num_prompts": 1}
    return Task.model_validate(
        {
            "model_dir": str(model),
            "output_dir": str(output),
            "config": config,
            "export": [export],
            "gate": "off",
            "evaluation": evaluation,
            "calibration": {"source": str(source), "num_samples": 4, "seq_len": seq_len},
        }
    )


def run(task):
    with proving_here():
        job.run(task, lambda event: None)
    return json.loads((task.output_dir / "report.json").read_text())


def difference(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_streamed_model_computes_what_transformers_computes_for_an_image(name, saved, rows_for, tmp_path):
    windows = job.read_windows(task_of(saved(name), rows_for(name), tmp_path / "out"))
    check_against_transformers(saved(name), name, windows.calibration_NT, windows.calibration_media)


def check_against_transformers(folder, name, ids_NT, media):
    model = open_model(read_model(folder))
    hidden = model.streamed.embed(ids_NT, media=media)
    model.run(hidden, lambda done: None)
    whole = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    with model.head() as head, torch.no_grad():
        for ids_T, seen, state in zip(ids_NT, media, hidden.states, strict=True):
            expected = whole(input_ids=ids_T[None], **seen).logits
            blind = whole(input_ids=ids_T[None]).logits
            assert difference(head(state), expected) < 1e-5 < 0.1 < difference(blind, expected)


def test_whisper_hears_what_is_said(tmp_path):
    model, source = save_whisper(tmp_path / "model"), save_transcripts(tmp_path / "data", 40)
    windows = job.read_windows(task_of(model, source, tmp_path / "out", seq_len=64))
    assert (windows.calibration_NT[:, :2] == torch.tensor([6, 7])).all() and not (windows.calibration_NT == 5).any()
    text = load_tokenizer(model).decode(windows.held_out_NT[0, 2:])
    assert text.startswith("these are the words of number 3. these are the words of n")  # the first row held out
    streamed = open_model(read_model(model))
    hidden = streamed.streamed.embed(windows.calibration_NT, media=windows.calibration_media)
    streamed.run(hidden, lambda done: None)
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    heard = windows.calibration_media
    with streamed.head() as head, torch.no_grad():
        for number, (ids_T, state) in enumerate(zip(windows.calibration_NT, hidden.states, strict=True)):
            asked = {"decoder_input_ids": decoder_inputs(whole.config, ids_T[None])}
            expected, other = (whole(**heard[which], **asked).logits for which in (number, number - 1))
            assert difference(head(state), expected) < 1e-5 < 1e-4 < difference(other, expected)
    config = presets.resolve("int8").to_dict()
    report = run(task_of(model, source, tmp_path / "out", seq_len=64, config=config))
    assert report["quality"]["num_tokens"] == 2 * 64


def test_sound_that_is_too_long_for_a_window_is_told(tmp_path):
    model, source = save_whisper(tmp_path / "model"), save_transcripts(tmp_path / "data", 120)
    with pytest.raises(CalibrationError, match="not fill a window"):
        job.read_windows(task_of(model, source, tmp_path / "out", seq_len=4096))


QWEN = {
    "Qwen2_5_VLForConditionalGeneration": "positions in three axes",
    "Qwen3VLForConditionalGeneration": "features of images added between its blocks",
}


@pytest.mark.parametrize("name", QWEN)
def test_qwen_sees_images_of_several_sizes(name, tmp_path):
    """Its own processor needs torchvision: patches are drawn at random."""
    config = small_config(find_class(name))
    config["vision_config"] |= {
        "num_heads": 4,
        "hidden_size": 64,
        "out_hidden_size": config["text_config"]["hidden_size"],
    }
    if "deepstack_visual_indexes" in config["vision_config"]:
        config["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    save_byte_tokenizer(tmp_path)
    built = build_tiny_model(config, 0, getattr(transformers, name))
    built.save_pretrained(tmp_path)
    vision, token = built.config.vision_config, built.config.image_token_id
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    ids, media = [], []
    for rows, columns in ((8, 8), (4, 16)):
        ids.append(torch.tensor([5, 6, *[token] * (rows * columns // 4), 7, 8, 9, 10, 11]))
        media.append(
            {
                "pixel_values": torch.randn(rows * columns, width, generator=torch.Generator().manual_seed(rows)),
                "image_grid_thw": torch.tensor([[1, rows, columns]]),
                "mm_token_type_ids": (ids[-1] == token).long()[None],
            }
        )
    check_against_transformers(tmp_path, name, torch.stack(ids), media)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != QWEN_AUDIO])
def test_a_window_is_what_the_processor_makes_of_the_chats(name, saved, rows, tmp_path):
    windows = job.read_windows(task_of(saved(name), rows, tmp_path / "out"))
    processor = transformers.AutoProcessor.from_pretrained(saved(name))
    [row] = [json.loads(line) for line in rows.read_text().splitlines()][3:4]  # the first that is held out
    row["messages"][0]["content"][0]["image"] = image(3)
    expected = processor.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_tensors="pt", add_special_tokens=False
    )
    num = len(expected["input_ids"][0])
    assert num < SEQ_LEN and torch.equal(windows.held_out_NT[0, :num], expected["input_ids"][0])
    pixels = windows.held_out_media[0]["pixel_values"].flatten()
    assert torch.equal(pixels[: expected["pixel_values"].numel()], expected["pixel_values"].flatten())


@pytest.mark.parametrize("name", with_rare(FAMILIES, [LLAVA, QWEN_AUDIO]))
def test_a_job_learns_from_images(name, saved, rows_for, tmp_path):
    report = run(task_of(saved(name), rows_for(name), tmp_path / "seen"))
    windows = job.read_windows(task_of(saved(name), rows_for(name), tmp_path / "out"))
    scored = (~windows.is_placeholder(windows.held_out_NT[:, 1:])).sum()
    assert report["quality"]["num_tokens"] == scored < windows.held_out_NT[:, 1:].numel()
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"A text about {number}. " * 20}) for number in range(40)))
    run(task_of(saved(name), texts, tmp_path / "read"))
    seen, read, float_model = (
        getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
        for folder in (tmp_path / "seen", tmp_path / "read", saved(name))
    )
    errors = []
    for model in (seen, read):
        with torch.no_grad():
            logits = [
                [each(input_ids=ids_T[None], **media).logits for each in (model, float_model)]
                for ids_T, media in zip(windows.held_out_NT, windows.held_out_media, strict=True)
            ]
        errors.append(sum(difference(*pair) for pair in logits))
    assert errors[0] < 0.9 * errors[1]  # on images that it has not seen, it is better than what only read texts


@pytest.mark.parametrize("name", with_rare([*FAMILIES], [LLAVA, "Qwen3VLForConditionalGeneration"]))
def test_a_job_with_quantized_towers_learns_from_what_they_see(name, saved, rows_for, tmp_path):
    """Its measured divergence is that of its files in Transformers, whose towers are those of the result."""
    model, output = saved(name), tmp_path / "out"
    config = presets.resolve("fp8_dynamic", towers="fp8").to_dict() | {"algo_config": [{"name": "gptaq"}]}
    report = run(task_of(model, rows_for(name), output, config=config, export="compressed_tensors"))
    assert any(re.search("vision|visual|audio", layer["name"]) for layer in report["layers"])
    windows = job.read_windows(task_of(model, rows_for(name), tmp_path / "unused", config=config))
    models = [getattr(transformers, name).from_pretrained(folder, dtype=torch.float32) for folder in (model, output)]
    divergences = []
    for ids_T, seen in zip(windows.held_out_NT, windows.held_out_media, strict=True):
        is_scored = ~windows.is_placeholder(ids_T[1:])
        with torch.no_grad():
            log_p, log_q = (
                each(input_ids=ids_T[None], **seen).logits[0, :-1].log_softmax(-1)[is_scored] for each in models
            )
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
    measured = report["quality"]["divergence"]["kl_mean"]["value"]
    assert measured == pytest.approx(torch.cat(divergences).mean().item(), rel=0.02)


def test_a_result_is_evaluated_on_images(saved, rows, tmp_path):
    model, output, config = saved(LLAVA), tmp_path / "out", presets.resolve("fp8_dynamic", towers="fp8").to_dict()
    run(task_of(model, "builtin", output, config=config, export="compressed_tensors"))
    evaluation = EvaluationConfig(source=str(rows), num_windows=3, seq_len=SEQ_LEN, num_prompts=1)
    result = evaluate(str(output), str(model), evaluation, lambda event: None)
    text = read_text(evaluation, model)
    models = [getattr(transformers, LLAVA).from_pretrained(folder, dtype=torch.float32) for folder in (model, output)]
    divergences = []
    for ids_T, seen, targets_P in zip(text.ids_NT, text.media, text.targets_NP, strict=True):
        with torch.no_grad():
            log_p, log_q = (
                each(input_ids=ids_T[None], **seen).logits[0, :-1].log_softmax(-1)[targets_P >= 0] for each in models
            )
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
    expected = torch.cat(divergences).mean().item()
    assert result.quality.divergence.kl_mean.value == pytest.approx(expected, rel=1e-4)
    assert result.samples and "<image>" not in result.samples[0].prompt


def test_windows_that_end_with_an_image_give_no_samples(saved, tmp_path):
    source, warnings = save_rows(tmp_path / "data", 40, words=1), []
    evaluation = EvaluationConfig(source=str(source), num_windows=2, seq_len=88, num_prompts=len(QUESTIONS) + 1)
    result = evaluate(str(saved(LLAVA)), str(saved(LLAVA)), evaluation, warnings.append)
    assert [sample.prompt for sample in result.samples] == list(QUESTIONS)
    assert "8 samples instead of 9" in str(warnings)


def test_the_same_images_in_the_data_themselves(saved, rows, tmp_path):
    inline = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        part = row["messages"][0]["content"][0]
        data = base64.b64encode((rows.parent / part.pop("image")).read_bytes()).decode()
        part |= {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        inline.append(json.dumps(row))
    (tmp_path / "inline.jsonl").write_text("\n".join(inline))
    tasks = [task_of(saved(LLAVA), source, tmp_path / "out") for source in (rows, tmp_path / "inline.jsonl")]
    first, second = (job.read_windows(task) for task in tasks)
    assert {tuple(ids) for ids in first.held_out_NT.tolist()} == {tuple(ids) for ids in second.held_out_NT.tolist()}
    assert torch.equal(first.held_out_media[0]["pixel_values"], second.held_out_media[0]["pixel_values"])


def test_images_that_do_not_fit_are_told(saved, rows, tmp_path):
    report = run(task_of(saved(LLAVA), rows, tmp_path / "out", seq_len=128))
    assert "only the text was used" in " ".join(report["warnings"])
    with pytest.raises(CalibrationError, match="rows were skipped, because they fit into no window") as caught:
        run(task_of(saved("Idefics3ForConditionalGeneration"), rows, tmp_path / "short", seq_len=32))
    assert caught.value.code == "not_enough_samples" and "seq_len" in caught.value.hint


def test_an_image_is_opened_twice_at_most(saved, tmp_path, monkeypatch):
    """Once to see if its row has room in the window, and once for the window."""
    opened = []

    def opened_once_more(data):
        opened.append(data)
        return image_of(data)

    image_of = media_reader.image_of
    monkeypatch.setattr(media_reader, "image_of", opened_once_more)
    rows = save_rows(tmp_path / "data", 80)
    windows = job.read_windows(task_of(saved(LLAVA), rows, tmp_path / "out", seq_len=640))
    media = (*windows.calibration_media, *windows.held_out_media)
    num_images = sum(len(one["pixel_values"]) for one in media)
    assert num_images > 2 * len(media)
    assert len(opened) <= 2 * num_images + len(media), "in each window, one row may have no room"


def test_images_that_are_huge_together_are_refused(saved, tmp_path, monkeypatch):
    """A file of some kilobytes can hold an image of 64 million pixels, and a row forty of them."""
    monkeypatch.setattr(media_reader, "MAX_PIXELS_AT_ONCE", 2 << 20)
    Image.new("RGB", (1024, 1024)).save(tmp_path / "large.png")
    assert (tmp_path / "large.png").stat().st_size < 16_000
    parts = [{"type": "image", "image": "large.png"}] * 3
    chat = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for _ in range(8)))
    with pytest.raises(CalibrationError, match="more than 2 million pixels in total") as caught:
        job.read_windows(task_of(saved(LLAVA), tmp_path / "rows.jsonl", tmp_path / "out"))
    assert caught.value.code == "bad_media" and "Line " in caught.value.message


WRONG = {
    "no such file": ({"image": "missing.png"}, "bad_media", "missing.png"),
    "outside": ({"image": "../models/secret.png"}, "unsafe_path", "secret.png"),
    "link": ({"image": "https://example.org/cat.png"}, "bad_media", "a link"),
    "no image": ({"image": "rows.jsonl"}, "bad_media", "cannot be read"),
    "nothing": ({}, "bad_media", "without a file"),
    "video": ({"type": "video", "video": "a.mp4"}, "bad_media", "video"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_image_that_cannot_be_read_is_refused_with_its_row(what, saved, tmp_path):
    changes, code, told = WRONG[what]
    part = {"type": "image"} | changes
    (tmp_path / "models").mkdir()
    image(0).save(tmp_path / "models" / "secret.png")
    (tmp_path / "data").mkdir()
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for _ in range(8)))
    with pytest.raises(QuantError, match=told) as caught:
        job.read_windows(task_of(saved(LLAVA), tmp_path / "data" / "rows.jsonl", tmp_path / "out"))
    assert caught.value.code == code and (code == "unsafe_path" or "Line " in caught.value.message)


def test_a_model_that_reads_only_text_refuses_images(rows, tmp_path):
    model = tiny_model(tmp_path / "llama")
    load_tokenizer(model).save_pretrained(model, chat_template="{{ messages }}")
    with pytest.raises(CalibrationError, match="this model reads only text") as caught:
        job.read_windows(task_of(model, rows, tmp_path / "out"))
    assert caught.value.code == "holds_media"
