"""mlx-lm on MLX's CPU backend loads our files: the same weights to the bit, the same logits, the same perplexity.

Logits and perplexities are those of float32 there. In 16 bits MLX rounds code * scale, and then the sum with the bias,
to that type (``mx.dequantize``, and the products on a CPU): 32 tokens of SmolLM2 had a perplexity of 148.2 in bfloat16
and of 140.27 in float32, where ours is 140.26. They need ``make consumers`` (an environment of their own); ``make
test-all`` runs them.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantcore
from quantcore.config import presets
from quantcore.config.quantization import QuantizationSpec, parse_config
from quantcore.engine.containers.dequantize import read_layer
from quantcore.export import mlx_models
from quantcore.importing.model import read_model
from quantcore.tensors.affine import params_of_minimum
from quantcore.tensors.packing import unpack
from quantcore.tensors.qtensor import quantize_weight
from tests.support.consumers import TOLERANCE, check, export_all
from tests.support.models import MIXTURES, tiny_model
from tests.support.reading import quantize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WIDE = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
EMBEDDING = "model.embed_tokens"
SAME = 1e-3
"""Of perplexities in float32, which are between 1e3 and 1e58 here: sums in another order, and another formula of GELU,
gave differences of up to 3e-4, most of them 1e-6. The wrong base of rotary embeddings gave 5e-3 and more."""
BIAS_ROUNDING = 2**-21
"""Of a weight with real zero points, as a part of the largest weight: (code - zero point) * scale is rounded twice in
float32, code * scale + bias as well."""


def groups(dtype, size=32, **spec):
    return {"weight": {"dtype": dtype, "qscheme": "per_group", "group_size": size, **spec}}


def only(layer, **rest):
    return parse_config({"global_quant_config": layer, "exclude": ["lm_head"], **rest})


ASYMMETRIC = {"symmetric": False, "zero_point_type": "float32"}
SCHEMES = {
    "int2 in groups of 32": only(groups("int2")),
    "int3 in groups of 128": only(groups("int3", 128)),
    "int5 in groups of 64": only(groups("int5", 64)),
    "int6 in groups of 64": only(groups("int6", 64)),
    "int8 in groups of 64": only(groups("int8", 64)),
    "uint2 in groups of 32, biases": only(groups("uint2", **ASYMMETRIC)),
    "int3 in groups of 32, biases": only(groups("int3", **ASYMMETRIC)),
    "uint5 in groups of 64, biases": only(groups("uint5", 64, **ASYMMETRIC)),
    "int6 in groups of 128, biases": only(groups("int6", 128, **ASYMMETRIC)),
    "uint8 in groups of 64, biases": only(groups("uint8", 64, **ASYMMETRIC)),
    "mxfp8_weight_only": only(groups("fp8_e4m3", scale_type="e8m0")),
    "int4 and int8, embedding": only(
        groups("int4", 64), layer_quant_config={"*.down_proj": groups("int8"), EMBEDDING: groups("int6", 64)}
    ),
}
NAMED = ("w4a16", "w4a16_sym", "mxfp4_weight_only")
EVERY = {**{name: presets.resolve(name) for name in NAMED}, **SCHEMES}
MODELS = {
    "cohere": {},
    "ernie4_5": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "num_hidden_layers": 4},
    "granite": {},
    "granitemoe": MIXTURES["granitemoe"],
    "hunyuan_v1_dense": {},
    "mistral": {},
    "mixtral": MIXTURES["mixtral"],
    "nemotron": {},
    "olmo2": {},
    "olmoe": MIXTURES["olmoe"],
    "phi3": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen2_moe": {**MIXTURES["qwen2_moe"], "tie_word_embeddings": False},
    "qwen3": {},
    "qwen3_moe": MIXTURES["qwen3_moe"],
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Every scheme of a tiny Llama in float32, with our perplexity, and what mlx-lm makes of it."""
    folder = tmp_path_factory.mktemp("exports")
    model = tiny_model(folder / "model", rank=16, dtype=torch.float32, **WIDE)
    results, windows = export_all(model, EVERY, ("mlx",), folder)
    return results, windows, check("mlx", "check_mlx.py", windows, *(found for found, _ in results.values()))


@pytest.mark.parametrize("scheme", EVERY)
def test_every_scheme_of_a_tiny_llama(exports, scheme, agrees):
    results, _, found = exports
    folder, summary = results[scheme]
    theirs = found[str(folder)]
    assert sum(theirs["modes"].values()) == summary["num_layers_quantized"], theirs
    config = None if scheme in NAMED else EVERY[scheme]
    agrees(
        "mlx-lm", "mlx", scheme, theirs["perplexity"], summary["perplexity_after"], SAME, "tiny llama", config=config
    )


@pytest.mark.parametrize("scheme", ["w4a16_sym", "w4a16", "int4 and int8, embedding", "mxfp4_weight_only"])
def test_logits_are_ours(exports, scheme, tmp_path):
    """Close to the float32 rounding of logits that are sums of a hundred products."""
    results, windows, _ = exports
    check("mlx", "check_mlx.py", "--logits", windows, results[scheme][0], tmp_path / "logits.safetensors")
    theirs = load_file(tmp_path / "logits.safetensors")["logits"][0]
    model, _ = quantcore.load(results[scheme][0])
    with torch.inference_mode():
        ours = model(torch.tensor(json.loads(windows.read_text())[:1])).logits[0]
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4 * ours.abs().max().item())


def test_mlx_decodes_every_weight_to_our_bits(tmp_path):
    """In bfloat16: the product of a code and a scale is exact in float32 then, so there is one right value."""
    model = tiny_model(tmp_path / "model", rank=16, **WIDE)
    for number, config in enumerate(EVERY.values()):
        out = tmp_path / str(number)
        quantize(model, out, config, "mlx")
        count = check("mlx", "check_mlx.py", "--dequantize", out, tmp_path / "values.safetensors")
        quantized, values = read_model(out).quantized, load_file(tmp_path / "values.safetensors")
        layers = {**quantized.layers, **quantized.embeddings}
        assert values.keys() == layers.keys() and count == len(layers)
        for name, layer in layers.items():
            ours, theirs = read_layer(quantized, layer).weight.dequantize(), values[name]
            allowed = 0 if layer.weight.symmetric else BIAS_ROUNDING * theirs.abs().max()
            assert (ours - theirs).abs().max() <= allowed, name


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(tmp_path, name, agrees):
    """Random weights: another base of rotary embeddings, another norm or expert gives another perplexity altogether."""
    model = tiny_model(tmp_path / "model", model_type=name, dtype=torch.float32, **{**WIDE, **MODELS[name]})
    results, windows = export_all(model, {"one": presets.resolve("w4a16_sym", group_size=32)}, ("mlx",), tmp_path)
    folder, summary = results["one"]
    theirs = check("mlx", "check_mlx.py", windows, folder)[str(folder)]
    assert isinstance(theirs, dict), theirs
    ours = summary["perplexity_after"]
    agrees("mlx-lm", "mlx", "w4a16_sym", theirs["perplexity"], ours, SAME, f"tiny {name}", name)


@pytest.mark.parametrize("preset", ["w4a16", "w4a16_sym", "mxfp4_weight_only"])
def test_a_real_model(smollm2, preset, tmp_path, agrees):
    results, windows = export_all(smollm2, {preset: presets.resolve(preset)}, ("mlx",), tmp_path)
    folder, summary = results[preset]
    theirs = check("mlx", "check_mlx.py", windows, folder)[str(folder)]
    assert "Paris" in theirs["text"]
    agrees("mlx-lm", "mlx", preset, theirs["perplexity"], summary["perplexity_after"], TOLERANCE)


@pytest.mark.parametrize(("bits", "size", "mode"), [(3, 32, "affine"), (4, 64, "affine"), (8, 32, "mxfp8"),
                                                    (4, 16, "nvfp4")])  # fmt: skip
def test_a_model_quantized_by_mlx_lm_is_read(tmp_path, bits, size, mode):
    """Its embedding is quantized as well, and its scales may be negative. NVFP4 has no scale above the others there."""
    model = tiny_model(tmp_path / "model", dtype=torch.float32, **WIDE)
    out = tmp_path / "out"
    check("mlx", "check_mlx.py", "--convert", model, out, str(bits), str(size), mode)
    (tmp_path / "windows.json").write_text(json.dumps(WINDOWS))
    theirs = check("mlx", "check_mlx.py", tmp_path / "windows.json", out)[str(out)]
    _, config = quantcore.load(out)
    assert set(read_model(out).quantized.embeddings) == {f"{EMBEDDING}.weight"}
    assert config.global_quant_config.weight.format.bits == bits
    assert theirs["perplexity"] == pytest.approx(perplexity_of(out), rel=SAME)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_quantized_by_mlx_lm_are_read(tmp_path, name):
    """It saves them in stacks, and quantizes routers: that of Qwen3-MoE, in 8 bits."""
    model = tiny_model(tmp_path / "model", model_type=name, dtype=torch.float32, **{**WIDE, **MODELS[name]})
    path = model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **mlx_models.earlier_names(config)}))  # mlx-lm reads the earlier names
    check("mlx", "check_mlx.py", "--convert", model, tmp_path / "out", "4", "64", "affine")
    (tmp_path / "windows.json").write_text(json.dumps(WINDOWS))
    theirs = check("mlx", "check_mlx.py", tmp_path / "windows.json", tmp_path / "out")[str(tmp_path / "out")]
    assert theirs["perplexity"] == pytest.approx(perplexity_of(tmp_path / "out"), rel=SAME)


def perplexity_of(folder: Path) -> float:
    loaded, _ = quantcore.load(folder)
    with torch.inference_mode():
        logits = loaded(torch.tensor(WINDOWS)).logits[:, :-1].flatten(0, 1)
    return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(WINDOWS)[:, 1:].flatten()).item())


WINDOWS = torch.arange(2 * 64).mul(7).remainder(509).view(2, 64).tolist()


@pytest.mark.parametrize(("bits", "size"), [(2, 32), (4, 64), (5, 128), (8, 64)])
def test_codes_for_mlxs_own_scales_are_mlxs(tmp_path, bits, size):
    """All but those of values in the middle of two codes, which a rounding of the zero point may move: less than 1 in
    10,000."""
    weight = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    stored = quantized_by_mlx(weight, tmp_path, bits, size, "affine")
    dtype = {2: "uint2", 4: "uint4", 5: "uint5", 8: "uint8"}[bits]
    spec = QuantizationSpec(dtype=dtype, qscheme="per_group", group_size=size, **ASYMMETRIC)
    theirs = unpack(stored["weight"].view(torch.int32), spec.format)
    ours = quantize_weight(weight, params_of_minimum(stored["scales"], stored["biases"], spec), spec).codes
    assert (ours.int() - theirs.int()).abs().max() <= 1
    assert (ours != theirs).float().mean() < 1e-4


def quantized_by_mlx(weight, folder: Path, bits, size, mode):
    save_file({"x": weight}, folder / "in.safetensors")
    check(
        "mlx",
        "check_mlx.py",
        "--quantize",
        folder / "in.safetensors",
        folder / "out.safetensors",
        str(bits),
        str(size),
        mode,
    )
    return {name.removeprefix("x."): each for name, each in load_file(folder / "out.safetensors").items()}


def test_the_list_of_models_is_mlx_lms():
    """After an update of mlx-lm: run mlx_model_types.py, and put its result into mlx_models.json."""
    found = check("mlx", "mlx_model_types.py")
    assert found == json.loads(Path(mlx_models.__file__).with_suffix(".json").read_text())
