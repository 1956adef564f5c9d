"""GGUF files of tiny models: Transformers and gguf's own reader find in them what the engine computed.

The file is made by the whole engine, whose proof reads it back; here readers that know nothing of us do the same.
"""

import itertools
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore.checkpoint.headers import read_local
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import QuantizationSpec, parse_config
from quantcore.engine.containers.gguf import GgufSink
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.engine.verification.verify import WrittenCheckpoint
from quantcore.errors import ConfigError, ProofError
from quantcore.export import FileContents, default_format, formats_for
from quantcore.export.gguf.tensor_names import Places
from quantcore.plan.planner import make_plan
from quantcore.tensors.source import Source
from tests.support.gguf import CALIBRATION, LLAMA3, MODELS, WIDE, run
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_rare, with_usual


def read(file):
    """(values float32 by name, types by name, fields) as gguf's own reader and dequantizer see them."""
    reader = GGUFReader(file)
    values = {one.name: torch.from_numpy(dequantize(one.data, one.tensor_type).copy()) for one in reader.tensors}
    types = {one.name: one.tensor_type.name for one in reader.tensors}
    return values, types, {name: field.contents() for name, field in reader.fields.items()}


def rounded(model_dir, layers):
    """The float checkpoint's tensors in float32, those of planned layers rounded as the plan says."""
    source = Source(model_dir, read_local(model_dir).tensors)
    state = {name: source.read(name).float() for name in source.tensors}
    for layer in layers:
        weight = source.read(f"{layer.name}.weight")
        state[f"{layer.name}.weight"] = round_to_nearest(weight, layer.weight).dequantize()
    return state


def plan_of(model_dir, config):
    headers = read_local(model_dir)
    return make_plan(JobSpec(config=config, calibration=CALIBRATION, export=("gguf",)), headers)


@pytest.mark.parametrize(
    "name", with_usual([name for name in MODELS if name != "mixtral"], ["llama", "qwen3_moe", "gemma2"])
)  # Mixtral is read as a llama
def test_transformers_reads_the_same_model(tmp_path, name, proof_in_this_process):
    """To the last bit: 8-bit codes times a float16 scale are exact in float32."""
    model_dir = tiny_model(tmp_path / "model", model_type=name, **MODELS[name])
    report = run(model_dir, tmp_path / "out", presets.resolve("gguf_q8_0"))
    assert report["proof"]["gguf"]["max_logit_difference"] == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "MANIFEST.json", "README.md", "model.gguf", "plan.json", "report.html", "report.json", "reproduce.sh"
    }  # fmt: skip
    config = AutoConfig.from_pretrained(model_dir)
    given = {} if name in ("llama", "mistral") else {"config": config}  # Transformers takes too little from the file
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32, **given)
    state = rounded(model_dir, plan_of(model_dir, presets.resolve("gguf_q8_0")).layers)
    config.save_pretrained(tmp_path / "rounded")
    save_file(state, tmp_path / "rounded/model.safetensors", metadata={"format": "pt"})
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded", dtype=torch.float32).state_dict()
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


PRESETS = ("gguf_q4_0", "gguf_q4_1", "gguf_q5_0", "gguf_q5_1", "gguf_q8_0")


OFTEN = [("gguf_q4_0", "llama"), ("gguf_q4_0", "mixtral"), ("gguf_q5_1", "llama"), ("gguf_q8_0", "llama")]


@pytest.mark.parametrize(
    ("preset", "name"), with_usual(itertools.product(PRESETS, ("llama", "qwen2", "mixtral")), OFTEN)
)
def test_ggufs_own_reader_sees_the_rounded_weights(tmp_path, name, preset, proof_in_this_process):
    """All tensors, codes by gguf's dequantizer. It adds a minimum, we subtract a zero point: 2 roundings."""
    dtype = torch.float32 if name == "llama" else torch.bfloat16  # whose minimums are exact in float16 anyway
    model_dir = tiny_model(tmp_path / "model", model_type=name, dtype=dtype, **MODELS[name])
    config = presets.resolve(preset)
    run(model_dir, tmp_path / "out", config)
    values, types, _ = read(tmp_path / "out/model.gguf")
    layers = {f"{layer.name}.weight": layer for layer in plan_of(model_dir, config).layers}
    places = Places(read_local(model_dir).config)
    for key, wanted in rounded(model_dir, layers.values()).items():
        place = places.find(key)
        found = values[place.name] if place.index is None else values[place.name][place.index]
        if place.num_heads:
            found = found.view(place.num_heads, -1, 2, *found.shape[1:]).transpose(1, 2).reshape(found.shape)
        is_float32 = dtype is torch.float32 or wanted.ndim == 1 or "gate_inp" in place.name
        kept = "F32" if is_float32 else "BF16"
        assert types[place.name] == (preset.removeprefix("gguf_").upper() if key in layers else kept)
        slack = 2.0**-22 * wanted.abs().max() if preset.endswith("1") and key in layers else 0.0
        assert (found - wanted).abs().max() <= slack, key
    assert len(values) == len({places.find(key).name for key in rounded(model_dir, ())})


IQ_PRESETS = ("gguf_iq2_xxs", "gguf_iq2_xs", "gguf_iq2_s", "gguf_iq3_xxs", "gguf_iq3_s")
K_PRESETS = (*IQ_PRESETS, "gguf_q2_k", "gguf_q3_k", "gguf_iq4_xs", "gguf_q4_k", "gguf_q5_k", "gguf_q6_k")
OTHER_PRESETS = ("gguf_iq1_s", "gguf_iq1_m", "gguf_tq1_0", "gguf_tq2_0", "gguf_mxfp4", "gguf_nvfp4")
EXACT = (*IQ_PRESETS, "gguf_q3_k", "gguf_iq4_xs", "gguf_q6_k", *OTHER_PRESETS)  # without a minimum


K_OFTEN = [
    ("gguf_q2_k", ("gptq",)),
    ("gguf_q3_k", ()),
    ("gguf_iq4_xs", ("gptq",)),
    ("gguf_q4_k", ()),
    ("gguf_q4_k", ("awq", "gptq")),
    ("gguf_q5_k", ("autoround",)),
    ("gguf_q6_k", ()),
    ("gguf_iq2_xs", ("gptq",)),
    ("gguf_iq3_s", ("autoround",)),
    ("gguf_iq1_s", ("gptq",)),
    ("gguf_iq1_m", ("rtn",)),
    ("gguf_tq1_0", ("gptq",)),
    ("gguf_tq2_0", ("autoround",)),
    ("gguf_mxfp4", ("gptq",)),
    ("gguf_nvfp4", ("awq", "gptq")),
    ("gguf_nvfp4", ("autoround",)),
]


@pytest.mark.parametrize(
    ("preset", "algorithms"),
    with_usual(
        itertools.product((*K_PRESETS, *OTHER_PRESETS), [(), ("awq", "gptq"), ("rtn",), ("gptq",), ("autoround",)]),
        K_OFTEN,
    ),
)
def test_types_are_read_as_they_were_computed(tmp_path, preset, algorithms, proof_in_this_process):
    """The proof compares what our decoder reads; gguf's own must read the same, but for the roundings of a minimum."""
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float32, rank=16, **WIDE)
    names = [{"name": name, **({"iters": 3} if name == "autoround" else {})} for name in algorithms]
    config = parse_config({**presets.resolve(preset).to_dict(), "algo_config": names})
    report = run(model_dir, tmp_path / "out", config)
    values, types, _ = read(tmp_path / "out/model.gguf")
    assert types["blk.1.ffn_down.weight"] == preset.removeprefix("gguf_").upper()
    written = WrittenCheckpoint(plan_of(model_dir, config), tmp_path / "out", "gguf", read_local(model_dir))
    for name in ("mlp.down_proj", "self_attn.v_proj"):
        ours = written.read_float(f"model.layers.1.{name}.weight")
        theirs = values[f"blk.1.{'ffn_down' if 'down' in name else 'attn_v'}.weight"]
        assert (ours - theirs).abs().max() <= (0 if preset in EXACT else 2.0**-22 * ours.abs().max())
    bound = {"iq2_xxs": 0.8, "iq2_xs": 0.7, "iq2_s": 0.6, "iq3_xxs": 0.5, "iq3_s": 0.35}
    bound |= {"q2_k": 0.5, "q3_k": 0.25, "iq4_xs": 0.13, "q4_k": 0.12, "q5_k": 0.06, "q6_k": 0.03}
    bound |= {"iq1_s": 0.9, "iq1_m": 0.9, "tq1_0": 0.7, "tq2_0": 0.7, "mxfp4": 0.16, "nvfp4": 0.13}
    moves_far = "awq" in algorithms or ("autoround" in algorithms and "_tq" in preset)  # 3 steps of a third of a code
    assert all(layer["relative_error"] < bound[preset[5:]] for layer in report["layers"]) or moves_far


@pytest.mark.parametrize(
    ("preset", "other"),
    with_usual(
        zip(K_PRESETS, (*["IQ4_NL"] * 5, "Q4_0", "Q4_0", "IQ4_NL", "Q5_0", "Q5_1", "Q8_0"), strict=True),
        [("gguf_q3_k", "Q4_0"), ("gguf_iq4_xs", "IQ4_NL")],
    ),
)
def test_rows_that_hold_no_super_blocks_get_another_type(tmp_path, preset, other, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", **{**WIDE, "intermediate_size": 320})
    report = run(model_dir, tmp_path / "out", presets.resolve(preset))
    _, types, _ = read(tmp_path / "out/model.gguf")
    wanted = preset.removeprefix("gguf_").upper()
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == (other, wanted)
    [line] = report["warnings"]
    assert line == (
        "The rows of 2 layer(s) are not a multiple of 256, first model.layers.0.mlp.down_proj: they are stored as"
        f" {other} instead of {wanted}."
    )
    headers = read_local(model_dir)
    with pytest.raises(ConfigError, match=r"2 layer\(s\) do not have a multiple of that.*320 inputs"):
        make_plan(JobSpec(config=presets.resolve(preset), calibration=CALIBRATION, export=("fake_quantized",)), headers)


@pytest.mark.parametrize(
    ("preset", "width", "block", "other"),
    [("gguf_nvfp4", 288, 64, "IQ4_NL"), ("gguf_tq1_0", 320, 256, "Q4_0"), ("gguf_iq1_m", 320, 256, "IQ4_NL")],
)
def test_rows_that_hold_no_blocks_get_another_type(tmp_path, preset, width, block, other, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", **{**WIDE, "intermediate_size": width})
    report = run(model_dir, tmp_path / "out", presets.resolve(preset))
    _, types, _ = read(tmp_path / "out/model.gguf")
    wanted = preset.removeprefix("gguf_").upper()
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == (other, wanted)
    assert (
        f"The rows of 2 layer(s) are not a multiple of {block}, first model.layers.0.mlp.down_proj: they are stored as"
        f" {other} instead of {wanted}." in report["warnings"]
    )


def test_a_preset_of_gguf_is_a_gguf_file():
    """Also if another format holds the same codes and scales; no other one has NVFP4 without a global scale."""
    assert default_format(presets.resolve("gguf_mxfp4")) == "gguf"
    assert default_format(presets.resolve("mxfp4_weight_only")) == "compressed_tensors"
    assert formats_for(presets.resolve("gguf_nvfp4")) == ["gguf", "fake_quantized"]


UINT4 = QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=32, symmetric=False)


@pytest.mark.parametrize(
    "algorithms",
    with_rare(
        [[], ["gptq"], ["awq"], ["awq", "gptq"], ["autoround"], ["rotation", "gptq"]],
        [[], ["gptq"], ["awq"], ["autoround"]],
    ),
)
def test_whole_zero_points_become_minimums_whatever_chooses_the_codes(tmp_path, algorithms, proof_in_this_process):
    """A config as AMD Quark's w_uint4_per_group_asym: what it leaves to the model's dtype is float16 in the file."""
    model_dir = tiny_model(tmp_path / "model", rank=16, dtype=torch.float32)
    names = [{"name": name, **({"iters": 20, "minmax_lr": 0.02} if name == "autoround" else {})} for name in algorithms]
    config = parse_config({
        "global_quant_config": {"weight": UINT4.to_dict()}, "exclude": ["lm_head"], "algo_config": names,
    })  # fmt: skip
    report = run(model_dir, tmp_path / "out", config)
    assert [line for line in report["warnings"] if "float16 scales and minimums, so 21 layer(s)" in line]
    _, types, _ = read(tmp_path / "out/model.gguf")
    assert types["blk.0.ffn_down.weight"] == "Q4_1"
    errors = [layer["output_error"] for layer in report["layers"] if layer["output_error"] is not None]
    assert bool(errors) == (bool(algorithms)) and all(error < 0.2 for error in errors)


def test_two_formats_must_agree_on_the_spec(tmp_path):
    headers = read_local(tiny_model(tmp_path / "model"))
    asymmetric, symmetric = presets.resolve("uint4_wo_32"), presets.resolve("int4_wo_32")
    with pytest.raises(ConfigError, match="zero points are stored as whole numbers"):
        make_plan(JobSpec(config=asymmetric, calibration=CALIBRATION, export=("gguf", "quark")), headers)
    plan = make_plan(JobSpec(config=symmetric, calibration=CALIBRATION, export=("gguf", "quark")), headers)
    assert {layer.weight.scale_type.value for layer in plan.layers} == {"float16"}


def test_an_odd_model(tmp_path, proof_in_this_process):
    """Biases, one key head, a tied embedding with more rows than tokens, a layer excluded, one of another type."""
    model_dir = tiny_model(tmp_path / "model", model_type="qwen2", num_key_value_heads=1, vocab_size=517)
    config = replace(
        presets.resolve("gguf_q4_1"),
        exclude=("*.0.self_attn.k_proj",),
        layer_quant_config={"*.1.mlp.down_proj": presets.resolve("gguf_q8_0").global_quant_config},
    )
    report = run(model_dir, tmp_path / "out", config)
    assert report["proof"]["gguf"]["num_tensors_equal"] == 3 * 12 + 2
    values, types, fields = read(tmp_path / "out/model.gguf")
    assert "output.weight" not in types and types["token_embd.weight"] == "BF16"
    assert types["blk.0.attn_k.weight"] == "BF16" and types["blk.1.ffn_down.weight"] == "Q8_0"
    assert types["blk.0.attn_q.bias"] == "F32" and types["blk.1.attn_k.weight"] == "Q4_1"
    assert len(fields["tokenizer.ggml.tokens"]) == fields["qwen2.vocab_size"] == 517
    assert fields["tokenizer.ggml.tokens"][-1] == "[PAD516]" and fields["tokenizer.ggml.token_type"][-1] == 5
    assert fields["qwen2.attention.head_count_kv"] == 1 and fields["general.file_type"] == 3
    bias = load_file(model_dir / "model.safetensors")["model.layers.2.self_attn.v_proj.bias"]
    assert torch.equal(values["blk.2.attn_v.bias"], bias.float())


def test_norms_near_zero_that_float32_cannot_add_to_one(tmp_path, proof_in_this_process):
    """What is lost of them is lost in the model, too: it multiplies with 1 + weight. Other formats keep them whole."""
    model_dir = tiny_model(tmp_path / "model", model_type="gemma2", **MODELS["gemma2"])
    tensors = load_file(model_dir / "model.safetensors")
    tiny = torch.randn(64).mul(1e-7).bfloat16()
    tensors["model.norm.weight"] = tiny
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    report = run(model_dir, tmp_path / "out", presets.resolve("gguf_q8_0"), ("fake_quantized", "gguf"))
    assert report["proof"]["gguf"]["max_logit_difference"] == 0
    values, _, fields = read(tmp_path / "out/gguf/model.gguf")
    assert torch.equal(values["output_norm.weight"], 1 + tiny.float())
    assert not torch.equal((values["output_norm.weight"] - 1).bfloat16(), tiny)
    assert torch.equal(load_file(tmp_path / "out/fake_quantized/model.safetensors")["model.norm.weight"], tiny)
    assert fields["gemma2.attention.sliding_window_pattern"] == [True, False, True]


def test_the_proof_sees_a_changed_bit(tmp_path, monkeypatch, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model")

    def damage(task, folder, expected, emit):
        [tensor] = [one for one in GGUFReader(folder / "model.gguf").tensors if one.name == "blk.1.attn_q.weight"]
        with (folder / "model.gguf").open("r+b") as file:
            file.seek(int(tensor.data_offset) + 100)
            byte = file.read(1)[0]
            file.seek(int(tensor.data_offset) + 100)
            file.write(bytes([byte ^ 1]))
        return proof_in_this_process(task, folder, expected, emit)

    monkeypatch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", damage)
    with pytest.raises(ProofError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        run(model_dir, tmp_path / "out", presets.resolve("gguf_q4_1"))


REFUSED = {
    "activations": (("llama", {}), "int8_dynamic", "stores only weights"),
    "group size": (("llama", {}), "w4a16", "groups of 32 inputs"),
    "dtype": (("llama", {}), "nf4", "symmetric int4, int5 and int8"),
    "global scale": (("llama", {}), "nvfp4_weight_only", "fp4 with scales e8m0 or ue4m3"),
    "attention": (("gemma2", {"query_pre_attn_scalar": 64}), "gguf_q8_0", "assumes query_pre_attn_scalar 16"),
    "activation": (("llama", {"hidden_act": "gelu"}), "gguf_q8_0", "llama.cpp assumes hidden_act silu"),
    "experts": (("mixtral", MIXTURES["mixtral"]), None, "the experts of a layer must form one tensor"),
    "rope": (("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}), "gguf_q8_0",
             "RoPE of type 'dynamic'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_file_cannot_hold_is_refused_before_any_work(tmp_path, case):
    (model_type, settings), preset, message = REFUSED[case]
    model_dir = tiny_model(tmp_path / "model", model_type=model_type, **settings)
    config = presets.resolve(preset or "gguf_q8_0")
    if preset is None:
        config = replace(config, exclude=("*.experts.1.w1",))
    with pytest.raises(ConfigError) as refusal:
        plan_of(model_dir, config)
    assert message in refusal.value.message and refusal.value.code == "incompatible_export"


def test_llama3_frequencies_are_those_of_transformers(tmp_path, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", rope_parameters=LLAMA3, head_dim=32)
    run(model_dir, tmp_path / "out", presets.resolve("gguf_q8_0"))
    values, _, fields = read(tmp_path / "out/model.gguf")
    plain = LLAMA3["rope_theta"] ** -(torch.arange(0, 32, 2) / 32)
    scaled = AutoModelForCausalLM.from_pretrained(model_dir).model.rotary_emb.inv_freq
    torch.testing.assert_close(plain / values["rope_freqs.weight"], scaled, rtol=1e-6, atol=0)
    assert fields["llama.rope.freq_base"] == 500000.0


def test_the_sink_takes_each_tensor_once_and_names_what_is_missing(tmp_path):
    model_dir = tiny_model(tmp_path / "model")
    plan = plan_of(model_dir, presets.resolve("gguf_q8_0"))
    headers = read_local(model_dir)
    contents = FileContents(plan.layouts["gguf"], plan.layers, headers.config, model_dir, headers.tensors)
    with closing(GgufSink(tmp_path / "out", contents)) as sink:
        sink.write("model.norm.weight", torch.ones(64))
        with pytest.raises(RuntimeError, match="written twice"):
            sink.write("model.norm.weight", torch.ones(64))
        with pytest.raises(RuntimeError, match=r"28 tensor\(s\) were never written, first 'model.embed_tokens.weight'"):
            sink.finish()
