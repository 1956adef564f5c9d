"""The types of a named mix are those that llama.cpp's own tool gives the same model.

It needs ``make consumers`` (an environment of its own); ``make test-all`` runs this.
"""

import pytest
from gguf import GGUFReader, LlamaFileType

from quantcore.checkpoint.headers import read_local
from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.gguf_types import MIXES
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.containers.gguf import places_of
from quantcore.engine.pipeline import job as pipeline
from quantcore.plan.planner import make_plan
from tests.support.consumers import run_in
from tests.support.converted import MODELS as CONVERTED
from tests.support.converted import with_tokenizer_of
from tests.support.models import MIXTURES, tiny_model
from tests.support.proofs import prove_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
SHORT = CalibrationConfig(seq_len=64)
MODELS = {
    "deep": ("llama", {**WIDE, "num_hidden_layers": 32}),
    "narrow": ("llama", {"num_hidden_layers": 9, "intermediate_size": 256}),  # the fallbacks of rows of 64
    "shared heads": (
        "qwen2",
        {**WIDE, "num_hidden_layers": 17, "num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "70B": ("llama", {"num_hidden_layers": 80, "hidden_size": 256, "intermediate_size": 256, "head_dim": 32}),
    "8 experts": ("mixtral", {**MIXTURES["mixtral"], **WIDE, "num_hidden_layers": 8, "num_local_experts": 8}),
    "more experts": ("qwen3_moe", {**MIXTURES["qwen3_moe"], **WIDE, "norm_topk_prob": True, "num_hidden_layers": 8}),
    "one matrix for queries, keys and values": ("phi3", {**WIDE, "num_hidden_layers": 8, "tie_word_embeddings": False}),
    "gemma": ("gemma2", {**WIDE, "num_hidden_layers": 8, "query_pre_attn_scalar": 32}),
}
BY_CONVERTER = ("arcee", "bloom", "granitemoe", "lfm2", "olmo2", "starcoder2")
FLOATS = ("F32", "F16", "BF16")
WITH_IMATRIX = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS")
"""Mixes that llama.cpp's tool makes with an importance matrix only."""


@pytest.mark.parametrize("case", MODELS)
def test_the_types_of_every_mix(tmp_path, case, monkeypatch, quantize_with_imatrix):
    model_type, settings = MODELS[case]
    model = tiny_model(tmp_path / "model", model_type=model_type, **settings)
    compare_types(tmp_path, model, monkeypatch, quantize_with_imatrix)


@pytest.mark.parametrize("name", BY_CONVERTER)
def test_the_types_of_models_that_its_converter_lays_out(smollm2, tmp_path, name, monkeypatch, quantize_with_imatrix):
    deep = {**WIDE, "num_hidden_layers": 9, "tie_word_embeddings": name == "lfm2"}
    settings = deep | {key: value * 3 for key, value in CONVERTED[name].items() if key == "layer_types"}
    model = with_tokenizer_of(smollm2, tmp_path / "model", model_type=name, **settings)
    compare_types(tmp_path, model, monkeypatch, quantize_with_imatrix)


def compare_types(tmp_path, model, monkeypatch, quantize_with_imatrix):
    """The types of a plan are those of llama.cpp's own tool, for every mix."""
    monkeypatch.setattr(pipeline, "prove_in_fresh_process", prove_here)
    float_like = Task(
        model_dir=model, output_dir=tmp_path / "q8", config=presets.resolve("gguf_q8_0"), export=("gguf",),
        file2file=True, calibration=SHORT, evaluation=EvaluationConfig(num_windows=0),
    )  # fmt: skip
    pipeline.run(float_like, lambda event: None)
    headers = read_local(model)
    places = places_of(headers.config, headers.tensors)
    differs, matrix = {}, tmp_path / "im.gguf"
    assert main(["imatrix", str(model), "-o", str(matrix), "--num_calib_data", "1", "--seq_len", "64"]) == 0
    for mix in MIXES:
        target = tmp_path / f"{mix}.gguf"
        if mix in WITH_IMATRIX:
            number = LlamaFileType[f"MOSTLY_{mix}"].value
            printed = quantize_with_imatrix(matrix, tmp_path / "q8/model.gguf", target, number).stderr
        else:
            _, printed = run_in("llamacpp", "quantize_llamacpp.py", tmp_path / "q8/model.gguf", mix, target)
        assert target.exists(), printed[-3000:]
        theirs = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(target).tensors}
        plan = make_plan(JobSpec(config=presets.resolve(mix), calibration=SHORT, export=("gguf",)), headers)
        found = plan.layouts["gguf"].items()
        ours = {place.name: layout.dtype for name, layout in found for place in places.get(name, ())}
        odd = {
            name: (kind, theirs[name]) for name, kind in ours.items()
            if kind != theirs[name] and not {kind, theirs[name]} <= {*FLOATS}
        }  # fmt: skip
        differs |= {mix: odd} if odd else {}
        target.unlink()
    assert not differs
