"""Some of the classes that ``make sweep`` quantizes: text, mixtures, towers, recurrences, encoders.

With ``make test`` a dozen of them, each in two ways, so that six meet every way; with ``make test-all`` in every way.
"""

from pathlib import Path

import pytest

from tests.support.params import with_usual
from tests.sweep.classes import ModelClass, find_class
from tests.sweep.quantizing import WAYS, Outcome, Row, quantize_class
from tests.sweep.table import write_table

HALVES = (("data-free", "weight-only"), ("activation", "file-to-file"))

CHOSEN = [
    "BartForCausalLM",  # layers that are never called without an encoder
    "BeamForCausalLM",  # a router that computes in float32 beside bfloat16 norms
    "Gemma3ForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",  # takes its device from a tower
    "InternVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",  # the tower's tensors are put together when they are loaded
    "LlavaForConditionalGeneration",
    "Gemma3nForCausalLM",  # four copies of the hidden states, and keys and values that blocks share
    "MambaForCausalLM",  # dt_proj is read, not called
    "Qwen3_5ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "T5ForConditionalGeneration",  # blocks get the position bias that the first one returns
]
RARE = [
    "Blip2ForConditionalGeneration",  # only the model inside reads text without an image
    "Florence2ForConditionalGeneration",  # an encoder and a decoder, listed as if it had none
    "InklingForConditionalGeneration",  # gate and up alternate in stacks of experts; shared experts stay one stack
    "KimiLinearForCausalLM",  # the kernels of its convolutions are put together when they are loaded
    "Llama4ForCausalLM",  # stacks of transposed experts, which get scaled copies of all tokens
    "DbrxForCausalLM",  # the rows of all experts in one matrix
    "DiaForConditionalGeneration",  # its decoder reads and predicts tokens of sound, nine at each place
    "Ernie4_5_VLMoeForConditionalGeneration",  # experts for images beside those for text
    "JetMoeForCausalLM",  # experts in the attention, too
    "LukeForMaskedLM",  # the bias of its head has two names
    "MusicgenForCausalLM",  # a list of embeddings, and one of heads
    "LongcatFlashForCausalLM",  # some experts are the identity
    "MarianMTModel",  # its table of positions is computed, not stored
    "MiniMaxM3SparseForConditionalGeneration",  # gate and up become one layer
    "MllamaForConditionalGeneration",  # text skips the blocks that look at images
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Step3p7ForConditionalGeneration",  # gate, up and down are three stacks
    "SpeechT5ForSpeechToText",  # the part without a head has other names for its inputs
    "SwitchTransformersForConditionalGeneration",  # a mask chooses among experts that are modules of their own
    "T5Gemma2ForConditionalGeneration",  # its encoder is a tower, its decoder reads one half of a window
    "WhisperForConditionalGeneration",  # its encoder hears silence
]
USUAL = [(name, HALVES[index % 2]) for index, name in enumerate(CHOSEN)]
OTHERS = [(name, HALVES[1 - index % 2]) for index, name in enumerate(CHOSEN)]
ALL = [*USUAL, *OTHERS, *((name, tuple(WAYS)) for name in RARE)]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "ways"), with_usual(ALL, USUAL), ids=lambda one: one if isinstance(one, str) else "+".join(one)
)
def test_a_class_is_quantized_in_every_way_and_nothing_is_lost(name: str, ways: tuple[str, ...]) -> None:
    row = quantize_class(find_class(name), ways)
    assert not row.not_built
    assert {way: (outcome.verdict, outcome.detail) for way, outcome in row.outcomes.items()} == dict.fromkeys(
        ways, ("ok", "")
    )
    for way, outcome in row.outcomes.items():
        assert outcome.num_quantized > 0, way
        assert (outcome.unexplained, outcome.altered) == ((), ()), way


def test_the_page_counts_the_classes_and_says_why_one_does_not_work(tmp_path: Path) -> None:
    works, works_half, no_model = (ModelClass("causal", "x", name) for name in ("Works", "Half", "None"))
    refused = Outcome("refused", "unsupported_architecture: Its <loop> is odd: it turns.")
    half = {way: Outcome("ok") if way == "file-to-file" else refused for way in WAYS}
    rows = [Row(works, {way: Outcome("ok") for way in WAYS}), Row(works_half, half), Row(no_model, not_built="No.")]
    write_table(rows, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| causal | 2 | 1 (50 %) | 1 (50 %) | 1 (50 %) | 2 (100 %) | none | none |" in page
    assert "- Half, data-free, weight-only, activation: Its &lt;loop> is odd: it turns." in page
    assert "| Works | yes | yes | yes | yes |" in page and "- None: No." in page
