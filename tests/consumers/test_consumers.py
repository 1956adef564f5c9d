"""Programs that we did not write load what we export and compute what we measured.

They are vLLM on CPU, AMD Quark, and Transformers with GPTQModel and with bitsandbytes. They need ``make consumers``
(their own environments) and a real trained model; ``make test-all`` runs them.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import quantcore
from quantcore import ModelExporter, ModelQuantizer
from quantcore.config import presets
from quantcore.config.layer_plan import DRAFTS, LayerPlan
from quantcore.config.quantization import Config, parse_config
from quantcore.engine.containers.dequantize import open_source
from quantcore.export import EXPORTERS
from quantcore.importing.model import read_model
from tests.support.consumers import HAS_VNNI, NO_AVX512, TOLERANCE, check, check_vllm, export_all, run_in
from tests.support.modelopt import publish_as_nvfp4
from tests.support.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FORMATS = ("quark", "compressed_tensors")
BLOCKS = ("mxfp4", "mxfp4_weight_only", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8_weight_only", "nvfp4", "int4_fp8")
WHOLE_ROWS = ("int4_wo_per_channel", "uint4_wo_per_channel")
SAME = 1e-5
WITH_TIES = {"nvfp4": 5e-3}
"""The allowed differences from AMD Quark where it reads the same float32 model.

It divides a group's largest value by 6 and then by the global scale, we divide by their product. Where the exact scale
lies beside the middle of two fp8 numbers (68.000002 was seen), the two round to different ones: one token changes."""


@pytest.fixture(scope="session")
def exports(smollm2, tmp_path_factory):
    """Export both formats of three schemes of a real model, and of one with codes chosen out of the inputs' order."""
    configs = {preset: presets.resolve(preset) for preset in ("int8_dynamic", "w4a16", "fp8")}
    act_order = {"algo_config": [{"name": "awq"}, {"name": "gptaq", "desc_act": True}]}
    configs["act_order"] = parse_config({**configs["w4a16"].to_dict(), **act_order})
    return export_all(smollm2, configs, FORMATS, tmp_path_factory.mktemp("exports"))


def weights(dtype, **spec):
    """Return a config that quantizes only weights."""
    return parse_config({"global_quant_config": {"weight": {"dtype": dtype, **spec}}, "exclude": ["lm_head"]})


INT8 = presets.resolve("int8_weight_only").global_quant_config
GROUPS = {"qscheme": "per_group", "group_size": 32}
ONE_MODEL = {
    "w4a16_sym": ("quark", "compressed_tensors", "gptq", "awq"),
    "w4a16": ("quark", "compressed_tensors", "awq"),
}
GPTQ = {
    "int2": ("gptq", weights("int2", **GROUPS)),
    "int3": ("gptq", weights("int3", **GROUPS)),
    "int4_mixed": ("gptq", replace(weights("int4", **GROUPS), layer_quant_config={"*down_proj": INT8})),
    "int8": ("gptq", Config(global_quant_config=INT8, exclude=("lm_head",))),
    "uint2": ("gptq_v2", weights("uint2", symmetric=False, **GROUPS)),
    "int3_asymmetric": ("gptq_v2", weights("int3", symmetric=False, **GROUPS)),
    "uint4": ("gptq_v2", weights("uint4", symmetric=False, **GROUPS)),
    "uint8": ("gptq_v2", weights("uint8", symmetric=False, **GROUPS)),
}


@pytest.fixture(scope="session")
def block_exports(tmp_path_factory):
    """Export schemes of blocks and stages and a KV cache, in float32, for which Quark's kernels run on a CPU."""
    folder = tmp_path_factory.mktemp("blocks")
    configs = {preset: presets.resolve(preset) for preset in (*BLOCKS, *WHOLE_ROWS)}
    configs |= {"fp8": presets.resolve("fp8"), "kv": presets.resolve("fp8", kv_cache="fp8")}
    return export_all(
        tiny_model(folder / "model", dtype=torch.float32, max_position_embeddings=512, head_dim=32),
        configs,
        ("quark",),
        folder,
    )


@pytest.mark.parametrize("preset", ["int8_dynamic", "w4a16", "act_order"])
def test_vllm_loads_both_formats_generates_and_agrees(exports, preset, agrees):
    results, windows = exports
    folder, summary = results[preset]
    num_bits = 8 if preset == "int8_dynamic" else 4
    outputs = {name: check_vllm(folder / name, windows, num_bits=num_bits) for name in FORMATS}
    if None in outputs.values():
        pytest.skip(NO_AVX512)
    assert outputs["quark"]["method"] == "quark" and outputs["compressed_tensors"]["method"] == "compressed-tensors"
    if not HAS_VNNI:
        pytest.skip(NO_AVX512)
    for name, result in outputs.items():
        assert "Paris" in result["texts"][0]
        agrees("vLLM (CPU)", name, preset, result["perplexity"], summary["perplexity_after"], TOLERANCE)
    # The same codes under two sets of names must be the same model to the last bit.
    assert outputs["quark"]["perplexity"] == outputs["compressed_tensors"]["perplexity"]


@pytest.mark.parametrize("preset", list(ONE_MODEL))
def test_the_same_codes_in_every_format_are_the_same_model_in_vllm(smollm2, preset, tmp_path, agrees):
    formats = ONE_MODEL[preset]
    results, windows = export_all(smollm2, {preset: presets.resolve(preset)}, formats, tmp_path)
    folder, summary = results[preset]
    outputs = {name: check_vllm(folder / name, windows, num_bits=4) for name in formats}
    if None in outputs.values():
        pytest.skip(NO_AVX512)
    for name, result in outputs.items():
        assert "Paris" in result["texts"][0]
        agrees("vLLM (CPU)", name, preset, result["perplexity"], summary["perplexity_after"], TOLERANCE)
    assert len({result["perplexity"] for result in outputs.values()}) == 1, outputs


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_vllm_reads_one_scale_a_row(block_exports, name, agrees):
    results, windows = block_exports
    folder, summary = results[name]
    output = check_vllm(folder, windows, num_bits=4)
    if output is None:
        pytest.skip(NO_AVX512)
    agrees("vLLM (CPU)", "quark", name, output["perplexity"], summary["perplexity_after"], TOLERANCE, "tiny llama")


@pytest.mark.parametrize("name", list(GPTQ))
def test_gptqmodel_reads_every_width_of_gptq(smollm2, name, tmp_path, agrees):
    export, config = GPTQ[name]
    results, windows = export_all(smollm2, {name: config}, (export,), tmp_path)
    folder, summary = results[name]
    output = check("gptqmodel", "check_transformers.py", folder, windows, "gptqmodel")
    assert output["layers"] == {"TorchLinear": summary["num_layers_quantized"]}
    # Two bits, rounded to nearest, leave no model: both numbers are noise of the same size.
    tolerance = 0.5 if name in ("int2", "uint2") else TOLERANCE
    ours = summary["perplexity_after"]
    agrees("GPTQModel", export, name, output["perplexity"], ours, tolerance, config=config)


def test_transformers_reads_awq(smollm2, tmp_path, agrees):
    results, windows = export_all(smollm2, {"w4a16": presets.resolve("w4a16")}, ("awq",), tmp_path)
    folder, summary = results["w4a16"]
    output = check("gptqmodel", "check_transformers.py", folder, windows)
    assert sum(count for kind, count in output["layers"].items() if "Awq" in kind) == summary["num_layers_quantized"]
    assert "Paris" in output["texts"][0]
    agrees("Transformers + GPTQModel", "awq", "w4a16", output["perplexity"], summary["perplexity_after"], TOLERANCE)


@pytest.mark.parametrize("preset", ["fp8", "int8_dynamic", "w4a16_sym", "nvfp4_weight_only", "mxfp4_weight_only"])
def test_transformers_reads_compressed_tensors(smollm2, preset, tmp_path, agrees):
    results, windows = export_all(smollm2, {preset: presets.resolve(preset)}, ("compressed_tensors",), tmp_path)
    folder, summary = results[preset]
    output = check("peers", "check_transformers.py", folder, windows)
    agrees(
        "Transformers + compressed-tensors", "compressed_tensors", preset, output["perplexity"],
        summary["perplexity_after"], TOLERANCE,
    )  # fmt: skip


def test_transformers_reads_rounded_weights_as_an_ordinary_model(smollm2, tmp_path, agrees):
    results, windows = export_all(smollm2, {"w4a16": presets.resolve("w4a16")}, ("fake_quantized",), tmp_path)
    folder, summary = results["w4a16"]
    output = check("peers", "check_transformers.py", folder, windows)
    agrees("Transformers", "fake_quantized", "w4a16", output["perplexity"], summary["perplexity_after"], TOLERANCE)


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("nf4", "Linear4bit"),
        ("nf4_double_quant", "Linear4bit"),
        ("fp4_bnb", "Linear4bit"),
        ("fp4_bnb_double_quant", "Linear4bit"),
        ("llm_int8", "Linear8bitLt"),
    ],
)
def test_transformers_reads_bitsandbytes(smollm2, preset, kind, tmp_path, agrees):
    results, windows = export_all(smollm2, {preset: presets.resolve(preset)}, ("bitsandbytes",), tmp_path)
    folder, summary = results[preset]
    output = check("peers", "check_transformers.py", folder, windows)
    assert output["layers"] == {kind: summary["num_layers_quantized"]}
    assert "Paris" in output["texts"][0]
    agrees(
        "Transformers + bitsandbytes", "bitsandbytes", preset, output["perplexity"], summary["perplexity_after"],
        TOLERANCE,
    )  # fmt: skip


def test_vllm_decodes_nvfp4_of_modelopt_as_we_do(tmp_path):
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float32)
    publish_as_nvfp4(model_dir, has_own_file=True)
    assert check("vllm", "check_nvfp4.py", model_dir, tmp_path / "decoded.safetensors") == 21
    source = open_source(read_model(model_dir))
    for name, weight in load_file(tmp_path / "decoded.safetensors").items():
        torch.testing.assert_close(source.read(name), weight, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("drafts", [None, "int8"])
@pytest.mark.parametrize("export", ["compressed_tensors", "quark"])
def test_vllm_knows_how_draft_heads_are_stored(export, drafts, tmp_path):
    """It builds DeepSeek's draft with other names inside the block than the checkpoint has."""
    config, kept = presets.resolve("w4a16", drafts=drafts), ["lm_head", "model.layers.2.eh_proj"]
    scheme, draft = config.global_quant_config, config.draft_quant_config
    layers = [LayerPlan(f"model.layers.{block}.self_attn.q_proj", block, (64, 64), scheme) for block in range(2)]
    if draft is None:
        kept.append("model.layers.2.self_attn.q_proj")
    else:
        layers.append(LayerPlan("model.layers.2.self_attn.q_proj", None, (64, 64), draft, chosen_by=DRAFTS))
    names = ["mtp_block.self_attn.q_proj", "eh_proj"]
    names = [*(f"model.layers.2.{name}" for name in names), "model.layers.1.self_attn.q_proj"]
    (tmp_path / "names.json").write_text(json.dumps(names))
    described = EXPORTERS.get(export).quantization_config(config, tuple(layers), tuple(kept))
    (tmp_path / "config.json").write_text(json.dumps(described))
    found = check("vllm", "check_schemes.py", tmp_path / "config.json", tmp_path / "names.json")
    assert found == [None if drafts is None else 8, None, 4]


@pytest.mark.skipif(not HAS_VNNI, reason=NO_AVX512)
def test_vllm_takes_the_scales_of_the_kv_cache_from_both_formats(smollm2, tmp_path, agrees):
    config = presets.resolve("int8_dynamic", kv_cache="fp8")
    results, windows = export_all(smollm2, {"kv": config}, FORMATS, tmp_path)
    folder, summary = results["kv"]
    stored = load_file(folder / "quark" / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.{part}_proj.output_scale" for i in range(30) for part in "kv"]
    expected = torch.stack([stored[name].float() for name in names]).view(30, 2)
    outputs = {name: check("vllm", "check_vllm.py", folder / name, windows, "fp8") for name in FORMATS}
    for name, result in outputs.items():
        torch.testing.assert_close(torch.tensor(result["kv_scales"]), expected, rtol=1e-6, atol=0)
        agrees(
            "vLLM (CPU)", name, "int8_dynamic, fp8 KV cache", result["perplexity"], summary["perplexity_after"],
            TOLERANCE,
        )  # fmt: skip
    assert outputs["quark"]["perplexity"] == outputs["compressed_tensors"]["perplexity"]


NORMALIZED = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.skipif(not HAS_VNNI, reason=NO_AVX512)
def test_vllm_caches_normalized_keys_as_the_evaluation_does(tmp_path, agrees):
    """Scales of k_proj's outputs would clip them: behind k_norm and RoPE keys are eight times as large."""
    folder = tiny_model(tmp_path / "model", **NORMALIZED)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: 8 * tensor if name.endswith("k_norm.weight") else tensor for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    config = {"kv": presets.resolve("int8_dynamic", kv_cache="fp8")}
    results, windows = export_all(folder, config, FORMATS, tmp_path)
    out, summary = results["kv"]
    for name in FORMATS:
        output = check("vllm", "check_vllm.py", out / name, windows, "fp8")
        agrees(
            "vLLM (CPU)", name, "int8_dynamic, fp8 KV cache", output["perplexity"], summary["perplexity_after"],
            TOLERANCE, "tiny qwen3", "qwen3",
        )  # fmt: skip


OPT_125M = {
    "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "word_embed_proj_dim": 768, "num_attention_heads": 12,
    "num_hidden_layers": 12, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.skipif(not HAS_VNNI, reason=NO_AVX512)
def test_vllm_runs_opt_with_an_fp8_kv_cache(tmp_path, agrees):
    """vLLM runs it from compressed_tensors, but not from quark, by its own fault.

    It renames k_proj to qkv_proj first, and then has no place for qkv_proj.output_scale. Once vLLM fixes that,
    docs/reference/formats.md must say so."""
    config = {"kv": presets.resolve("int8_dynamic", kv_cache="fp8")}
    results, windows = export_all(tiny_model(tmp_path / "model", **OPT_125M), config, FORMATS, tmp_path)
    folder, summary = results["kv"]
    output = check("vllm", "check_vllm.py", folder / "compressed_tensors", windows, "fp8")
    agrees(
        "vLLM (CPU)", "compressed_tensors", "int8_dynamic, fp8 KV cache", output["perplexity"],
        summary["perplexity_after"], TOLERANCE, "opt-125m's shape", "opt",
    )  # fmt: skip
    stored = load_file(folder / "compressed_tensors" / "model.safetensors")
    names = [f"model.decoder.layers.{i}.self_attn.{part}_scale" for i in range(12) for part in "kv"]
    expected = torch.stack([stored[name].float().reshape(()) for name in names]).view(12, 2)
    torch.testing.assert_close(torch.tensor(output["kv_scales"]), expected, rtol=1e-6, atol=0)
    result, printed = run_in("vllm", "check_vllm.py", folder / "quark", windows, "fp8")
    assert result is None and "'QKVParallelLinear' object has no attribute 'data'" in printed


@pytest.fixture(scope="session")
def fp8_attention(tmp_path_factory):
    """Return preset -> (folder, model) exported from memory, with windows of token ids beside the folders."""
    root = tmp_path_factory.mktemp("attention")
    folder = tiny_model(root / "model", dtype=torch.float32, max_position_embeddings=512, head_dim=32)
    windows_NT = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    (root / "windows.json").write_text(json.dumps(windows_NT.tolist()))
    exports = {}
    for name in ("fp8", "int8_dynamic"):
        config = presets.with_attention(presets.resolve(name, kv_cache="fp8"), "fp8")
        quantizer, model = ModelQuantizer(config), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = quantizer.freeze(quantizer.quantize_model(model, [windows_NT]))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ModelExporter(root / name).export_safetensors_model(model, config, tokenizer=tokenizer)
        exports[name] = root / name, model
    return exports


def test_amd_quark_computes_fp8_attention_from_our_scales(fp8_attention):
    """All but keys, which it rounds as ``k_proj`` gives them: see ``test_amd_quark_reads_the_scales_of_a_kv_cache``."""
    folder, model = fp8_attention["fp8"]
    windows = folder.parent / "windows.json"
    windows_NT = torch.tensor(json.loads(windows.read_text()))

    def perplexity():
        with torch.no_grad():
            logits = model(windows_NT).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, windows_NT[:, 1:].flatten()).exp().item()

    ours = perplexity()
    hooks = []
    with pytest.MonkeyPatch.context() as patch:
        for layer in model.model.layers:
            keys = layer.self_attn.k_proj
            hooks.append(
                keys.register_forward_hook(lambda *call, rounded=keys.output_quantizer.forward: rounded(call[2]))
            )
            patch.setattr(keys.output_quantizer, "forward", lambda keys_BTI: keys_BTI)
        expected = perplexity()
    for hook in hooks:
        hook.remove()
    output = check("peers", "check_quark.py", folder, windows, "eager")
    assert abs(output["perplexity"] / expected - 1) < SAME
    assert abs(output["perplexity"] / ours - 1) > 100 * SAME


@pytest.mark.skipif(not HAS_VNNI, reason=NO_AVX512)
def test_vllm_loads_the_scales_of_fp8_attention(fp8_attention):
    """vLLM keeps them in bfloat16, its dtype here. Its attention on a CPU uses neither of them."""
    folder, model = fp8_attention["int8_dynamic"]
    output = check("vllm", "check_vllm.py", folder, folder.parent / "windows.json", "fp8")
    attentions = [layer.self_attn for layer in model.model.layers]
    expected = [
        [float(attention.q_proj.output_quantizer.scale), float(attention.softmax_quantizer.scale)]
        for attention in attentions
    ]
    kept = torch.tensor(expected).bfloat16().float()
    torch.testing.assert_close(torch.tensor(output["attention_scales"]), kept, rtol=1e-6, atol=0)


@pytest.mark.parametrize("preset", ["fp8", "int8_dynamic", "w4a16", "act_order"])
def test_amd_quark_reads_the_quark_format_and_agrees(exports, preset, agrees):
    results, windows = exports
    folder, summary = results[preset]
    output = check("peers", "check_quark.py", folder / "quark", windows)
    assert len(output["layers"]) >= summary["num_layers_quantized"]
    agrees("AMD Quark", "quark", preset, output["perplexity"], summary["perplexity_after"], TOLERANCE)


@pytest.mark.parametrize("name", [*BLOCKS, *WHOLE_ROWS])
def test_amd_quark_computes_the_same_from_blocks_and_stages(block_exports, name, agrees):
    results, windows = block_exports
    folder, summary = results[name]
    output = check("peers", "check_quark.py", folder, windows)
    tolerance = WITH_TIES.get(name, SAME)
    agrees("AMD Quark", "quark", name, output["perplexity"], summary["perplexity_after"], tolerance, "tiny llama")


def test_amd_quark_reads_the_scales_of_a_kv_cache(block_exports):
    """It rounds keys as ``k_proj`` gives them. A cache gets them after RoPE: so do vLLM, and our proof.

    So this is no row of the table; but what it computes is what those scales give in front of RoPE.
    """
    results, windows = block_exports
    folder, summary = results["kv"]
    model = quantcore.load(results["fp8"][0]).model

    def round_output(scale, output):
        return (output / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(output.dtype) * scale

    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.endswith(("k_proj.output_scale", "v_proj.output_scale"))]
    for name in names:
        layer = model.get_submodule(name.removesuffix(".output_scale"))
        layer.register_forward_hook(lambda *call, name=name: round_output(tensors[name], call[2]))
    losses = []
    with torch.no_grad():
        for window in json.loads(windows.read_text()):
            ids = torch.tensor([window])
            losses.append(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:]))
    expected = torch.stack(losses).mean().exp().item()
    output = check("peers", "check_quark.py", folder, windows)
    assert len(names) == 6 and abs(output["perplexity"] / expected - 1) < SAME
    assert abs(output["perplexity"] / summary["perplexity_after"] - 1) > 100 * SAME
