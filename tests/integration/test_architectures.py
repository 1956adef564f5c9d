"""The whole engine on tiny models of many architectures, saved as the Hub has them.

For each: the float stream has the perplexity of the whole model in Transformers, the proof passes (it reloads the files
and compares every tensor and the logits), and just the layers that should be are quantized, under the files' own names.
"""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantcore import presets
from quantcore.calibration.experts import MIN_TOKENS
from quantcore.calibration.text import token_windows
from quantcore.calibration.tokenizer import load_tokenizer
from quantcore.checkpoint.headers import read_tensor_headers
from quantcore.config import CalibrationConfig
from quantcore.errors import ConfigError
from quantcore.events import Warned
from quantcore.pipeline import run
from quantcore.task import EvaluationConfig, Task
from tests.factories import MIXTURES, tiny_model

SIXTEEN = {"query_pre_attn_scalar": 16, "sliding_window": 8}
MAMBA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip

# name: (preset, layers, routers kept, config). Three blocks; mixtures have four experts.
ARCHITECTURES = {
    "llama": ("w4a16", 3 * 7, 0, {}),
    "mixtral": ("w4a16", 3 * (4 + 4 * 3), 3, MIXTURES["mixtral"]),
    "qwen3_moe": ("fp8", 3 * (4 + 4 * 3), 3, MIXTURES["qwen3_moe"]),
    "gpt_neox": ("int8_dynamic", 3 * 4, 0, {"tie_word_embeddings": False}),
}
MORE = {
    "mistral": ("w4a16", 3 * 7, 0, {"sliding_window": 8}),
    "qwen2": ("fp8", 3 * 7, 0, {}),
    "qwen3": ("w4a16", 3 * 7, 0, {}),
    "gemma2": ("int8_dynamic", 3 * 7, 0, {**SIXTEEN, "final_logit_softcapping": 5.0}),
    "gemma3_text": (
        "int8_dynamic", 3 * 7, 0,
        {**SIXTEEN, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi3": ("w4a16", 3 * 4, 0, {"tie_word_embeddings": False}),
    "opt": ("w4a16", 3 * 6, 0, {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "granite": ("w4a16", 3 * 7, 0, {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "olmo2": ("fp8", 3 * 7, 0, {}),
    "bloom": ("int8_dynamic", 3 * 4, 0, {}),
    "gptj": ("int8_dynamic", 3 * 6, 0, {"rotary_dim": 8}),
    "cohere2": ("fp8", 3 * 7, 0, {}),
    "qwen2_moe": ("fp8", 3 * (4 + 4 * 3 + 3), 6, MIXTURES["qwen2_moe"]),  # a router and a gate for the shared expert
    "deepseek_v3": ("fp8", 3 * 5 + 3 + 2 * (4 * 3 + 3), 2, MIXTURES["deepseek_v3"]),  # MLA; block 0 is dense
    "olmoe": ("w4a16", 3 * (4 + 4 * 3), 3, MIXTURES["olmoe"]),
    "phimoe": ("w4a16", 3 * (4 + 4 * 3), 3, MIXTURES["mixtral"]),
    "granitemoe": ("w4a16", 3 * (4 + 4 * 3), 3, MIXTURES["granitemoe"]),  # stacked in the file
    "gpt_oss": ("int8_dynamic", 3 * (4 + 4 * 2), 3, MIXTURES["gpt_oss"]),  # gate and up in one, transposed in the file
    "qwen3_next": ("int8_dynamic", 4 + 2 * 3 + 3 * (4 * 3 + 3), 6, {**MIXTURES["qwen2_moe"], **MAMBA}),
}  # fmt: skip


def task_for(model_dir, output_dir, preset, export=("quark",)):
    return Task(
        model_dir=model_dir,
        output_dir=output_dir,
        config=presets.resolve(preset, group_size=32 if preset == "w4a16" else None),
        calibration=CalibrationConfig(num_samples=4, seq_len=64),
        evaluation=EvaluationConfig(num_windows=3, seq_len=64),
        export=export,
    )


def whole_perplexity(folder):
    """Of the held-out windows, by Transformers with the whole float model in memory."""
    tokenizer = load_tokenizer(folder)  # for some model types another class than the one that was saved
    windows = token_windows(
        CalibrationConfig(num_samples=4, seq_len=64),
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        num_held_out=3, held_out_len=64, separator=tokenizer.eos_token_id,
    ).held_out_NT  # fmt: skip
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(whole(ids[None]).logits[0, :-1], ids[1:]) for ids in windows]
    return torch.stack(losses).mean().exp().item()


def check(tmp_path, name, preset, num_layers, num_routers, overrides):
    """Quantize a tiny model and hold the report against what is known. Returns the folder of the export, the report."""
    model_dir = tiny_model(tmp_path / "model", model_type=name, dtype=torch.float32, **overrides)
    report = run(task_for(model_dir, tmp_path / "out", preset), lambda event: None)
    assert report["summary"]["perplexity_before"] == pytest.approx(whole_perplexity(model_dir), rel=1e-4)
    assert report["summary"]["perplexity_after"] == pytest.approx(report["summary"]["perplexity_before"], rel=0.5)
    assert report["proof"]["quark"]["max_logit_difference"] < 1e-5
    assert len(report["layers"]) == num_layers
    reasons = Counter(entry["reason"] for entry in report["kept"])
    assert reasons.pop("router", 0) == num_routers and sum(reasons.values()) == 1  # the head, tied or excluded
    return tmp_path / "out", report


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(tmp_path, name, proof_in_this_process):
    check(tmp_path, name, *ARCHITECTURES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_architectures(tmp_path, name, proof_in_this_process):
    check(tmp_path, name, *MORE[name])


def test_the_files_keep_the_names_of_the_checkpoint(tmp_path, proof_in_this_process):
    """Mixtral: ``block_sparse_moe.experts.0.w1`` in the files, ``mlp.experts.gate_up_proj`` in the model."""
    folder, report = check(tmp_path, "mixtral", *ARCHITECTURES["mixtral"])
    before, after = read_tensor_headers(tmp_path / "model"), read_tensor_headers(folder)
    assert {name for name in after if not name.endswith(("_scale", "_zero_point"))} == set(before)
    experts = "model.layers.2.block_sparse_moe.experts"
    assert f"{experts}.3.w2.weight_scale" in after
    assert f"{experts}.3.w2" in {layer["name"] for layer in report["layers"]}


def test_transformers_reads_experts_from_the_compressed_tensors_files(tmp_path, proof_in_this_process):
    """It puts them together in its fused module by itself, without our code (of int4 only symmetric ones)."""
    model_dir = tiny_model(tmp_path / "model", model_type="mixtral", dtype=torch.float32, **MIXTURES["mixtral"])
    task = task_for(model_dir, tmp_path / "out", "int4_wo_32", ("compressed_tensors",))
    report = run(task, lambda event: None)
    assert report["summary"]["perplexity_after"] == pytest.approx(whole_perplexity(tmp_path / "out"), rel=1e-4)
    assert report["summary"]["perplexity_after"] != pytest.approx(report["summary"]["perplexity_before"], rel=1e-2)


def test_experts_that_no_token_reaches_are_quantized_all_the_same(tmp_path, proof_in_this_process):
    """DeepSeek's router bias keeps every token away from experts 2 and 3: they take the input ranges of 0 and 1."""
    model_dir = tiny_model(tmp_path / "model", model_type="deepseek_v3", **MIXTURES["deepseek_v3"])
    tensors = load_file(model_dir / "model.safetensors")
    for block in (1, 2):
        tensors[f"model.layers.{block}.mlp.gate.e_score_correction_bias"] = torch.tensor([0.0, 0.0, -9.0, -9.0])
    save_file(tensors, model_dir / "model.safetensors")
    events = []
    task = task_for(model_dir, tmp_path / "out", "fp8").model_copy(update={"gate": "off"})
    report = run(task, events.append)
    warnings = [event for event in events if isinstance(event, Warned)]
    assert [warning.code for warning in warnings] == ["expert_saw_few_tokens"] * 2
    assert report["warnings"] == [warning.message for warning in warnings]
    assert f"2 expert(s) of model.layers.1.mlp saw fewer than {MIN_TOKENS}" in report["warnings"][0]
    assert "(expert 2 0, expert 3 0)" in report["warnings"][0]
    written = load_file(tmp_path / "out" / "model.safetensors")
    for projection in ("gate_proj", "down_proj"):
        scales = [written[f"model.layers.1.mlp.experts.{index}.{projection}.input_scale"] for index in range(4)]
        assert scales[2] == scales[3] == max(scales[:2]) > 0


def test_gpt2_s_layers_are_known_for_what_they_are(tmp_path):
    """Its ``Conv1D`` stores [in, out]. Planned as such; what the formats say of it is theirs to say."""
    model_dir = tiny_model(tmp_path / "model", model_type="gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=128)
    with pytest.raises(ConfigError, match=r"h\.0\.attn\.c_attn .* Conv1D") as caught:
        run(task_for(model_dir, tmp_path / "out", "w4a16"), lambda event: None)
    assert caught.value.code == "incompatible_export"
