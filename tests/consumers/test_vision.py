"""Transformers and vLLM answer about images from the files that we write, as the model with rounded weights does."""

import math
from functools import cache

import pytest

from quantcore.config import presets
from tests.support.consumers import HAS_VNNI, NO_AVX512, TOLERANCE, check, export_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FORMATS = {
    "w4a16_sym": ("compressed_tensors", "quark", "awq", "gptq"),
    "w4a16": ("compressed_tensors", "quark", "awq"),
    "int8_dynamic": ("compressed_tensors", "quark"),
}
CASES = [
    ("llava", "w4a16_sym", None),
    ("llava", "int8_dynamic", "int8"),
    ("qwen2_5_vl", "w4a16", None),
    ("qwen2_5_vl", "int8_dynamic", "int8"),
    ("gemma3", "w4a16_sym", None),
]
"""Family, preset, and the scheme of the tower."""


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a function from a family to a tiny model of it that names the colours of an image's two halves."""
    root = tmp_path_factory.mktemp("vision")

    @cache
    def train(family):
        check("vllm", "make_vision.py", family, root / family)
        return root / family

    return train


def perplexity(result):
    """Return that of an answer which is wrong about most of the images: its tokens are probable and improbable."""
    logprobs = [value for values in result["logprobs"].values() for value in values]
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.skipif(not HAS_VNNI, reason=NO_AVX512)
@pytest.mark.parametrize(("family", "preset", "towers"), CASES)
def test_programs_answer_about_images(trained, family, preset, towers, tmp_path, agrees):
    config = presets.resolve(preset, towers=towers)
    formats = FORMATS[preset]
    results, _ = export_all(trained(family), {preset: config}, (*formats, "fake_quantized"), tmp_path)
    folder, _ = results[preset]
    expected = check("vllm", "check_vision.py", "transformers", folder / "fake_quantized")
    # A model of this size, trained for a minute, may err about one or two images.
    assert sum(answer == right for right, answer in expected["answers"].items()) >= 14, expected["answers"]
    scheme = preset if towers is None else f"{preset}, {towers} tower"
    programs = [("vLLM (CPU)", "vllm", name) for name in formats]
    for consumer, program, name in (*programs, ("Transformers, of images", "transformers", "compressed_tensors")):
        result = check("vllm", "check_vision.py", program, folder / name)
        assert result["answers"] == expected["answers"], f"{consumer} answers otherwise from {name}"
        agrees(
            consumer, name, scheme, perplexity(result), perplexity(expected), TOLERANCE, f"tiny {family}, with images",
            family, config,
        )  # fmt: skip
