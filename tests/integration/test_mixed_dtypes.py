"""Models whose tensors have several dtypes: each format holds the scales that were computed."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantcore.config.presets import resolve
from quantcore.engine.modules.loading import load
from quantcore.engine.pipeline.job import run
from quantcore.errors import ModelError
from quantcore.importing.model import read_model
from tests.support.jobs import task
from tests.support.models import tiny_model, tiny_tokenizer

IDS = torch.arange(5, 29)[None]
KINDS = {
    "embedding and head in float32": (torch.bfloat16, ("embed_tokens", "lm_head"), torch.float32),
    "one layer in bfloat16": (torch.float32, ("layers.1.mlp.up_proj",), torch.bfloat16),
    "one layer in float32": (torch.bfloat16, ("layers.1.mlp.up_proj",), torch.float32),
    "one layer in float16": (torch.bfloat16, ("layers.1.mlp.up_proj",), torch.float16),
}
FORMATS = {
    "fp8": ("quark", "compressed_tensors", "fp8"),
    "w4a16": ("awq", "quark", "compressed_tensors"),
    "w4a16_sym": ("gptq", "gptq_v2", "fake_quantized"),
    "int8_dynamic": ("compressed_tensors", "onnx"),
    "gguf_q4_0": ("gguf",),
    "nf4": ("bitsandbytes",),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that makes a model of a kind; its head and embedding outweigh its one or two blocks."""
    made = {}

    def make(kind):
        dtype, names, other = KINDS[kind]
        if kind not in made:
            folder = tmp_path_factory.mktemp("dtypes") / "model"
            made[kind] = tiny_model(folder, dtype=dtype, tie_word_embeddings=False, num_hidden_layers=2)
            tensors = load_file(folder / "model.safetensors")
            for name in tensors:
                if any(part in name for part in names):
                    tensors[name] = (1.001 * tensors[name].double()).to(other)
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return made[kind]

    return make


FIRST, *OTHERS = KINDS


@pytest.mark.parametrize(
    ("kind", "preset"), [*((FIRST, name) for name in FORMATS), *((k, "w4a16_sym") for k in OTHERS)]
)
def test_every_format_holds_what_was_computed(kind, preset, models, tmp_path, proof_in_this_process):
    """The job compares what it wrote with what it computed, and one without a difference ends without an error."""
    model_dir = models(kind)
    assert read_model(model_dir).headers.main_dtype == {torch.bfloat16: "BF16", torch.float32: "F32"}[KINDS[kind][0]]
    run(task(model_dir, tmp_path / "out", preset, FORMATS[preset]), lambda event: None)
    if "fake_quantized" in FORMATS[preset]:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out/fake_quantized").train(False)
        with torch.no_grad():
            expected = theirs(IDS).logits.float()
            difference = (load(tmp_path / "out/gptq").model(IDS).logits.float() - expected).norm() / expected.norm()
        assert difference < 0.02  # bfloat16 has 8 bits


def test_scales_that_the_files_could_not_hold_are_refused_at_once(tmp_path):
    """T5 in float16: Transformers runs ``wo`` in float32, so its scales are float32 as well."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).half()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    events = []
    with pytest.raises(ModelError, match=r"wo in a narrower dtype") as caught:
        run(task(tmp_path / "model", tmp_path / "out", "int8_weight_only"), events.append)
    assert "'*.wo'" in caught.value.hint
    assert not [event for event in events if getattr(event, "phase", "") == "verify"]
    config = resolve("int8_weight_only", exclude=("*.wo",))
    run(task(tmp_path / "model", tmp_path / "out", config=config), events.append)
