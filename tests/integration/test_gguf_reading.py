"""GGUF files as input: the model that was written is found in the file alone, and goes all the ways of other models."""

import json
import struct
from functools import cache

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from safetensors.torch import load_file
from transformers import AutoConfig

import quantcore
from quantcore.checkpoint.headers import read_local
from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.engine.commands.convert import convert
from quantcore.engine.containers.dequantize import open_source
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation.provenance import identity_of
from quantcore.errors import ConfigError, ModelError
from quantcore.export.gguf.header import LONGEST_KEPT, read_gguf_header, shortest
from quantcore.importing.model import read_model
from tests.support.gguf import LLAMA3, MODELS, WIDE, split
from tests.support.models import tiny_model
from tests.support.params import with_rare, with_usual
from tests.support.proofs import proving_here
from tests.support.reading import measured, quantize

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
VARIANTS = {
    **{name: (name, settings) for name, settings in MODELS.items()},
    "yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6,
                                           "original_max_position_embeddings": 64}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama3": ("llama", {"head_dim": 32, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    "longrope": ("phi3", {"tie_word_embeddings": False, "rope_parameters": LONGROPE, "head_dim": 16}),
    "partial": ("phi3", {"tie_word_embeddings": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "odd": ("qwen2", {"num_key_value_heads": 1, "vocab_size": 517}),
    "float32": ("llama", {"dtype": torch.float32, "attention_bias": True}),
}  # fmt: skip
PRESETS = {"float32": "gguf_q8_0", "odd": "gguf_q4_1", "mixtral": "gguf_q5_0", "qwen3_moe": "gguf_q4_0"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """``written(name)``: (model folder, the job's report, the artifact's folder) of a variant as GGUF, to read only.

    Beside the artifact's folder is that of the same rounded weights in float.
    """

    @cache
    def write(name, preset=None):
        model_type, settings = VARIANTS[name]
        folder = tmp_path_factory.mktemp("written")
        model_dir = tiny_model(folder / "model", model_type=model_type, **settings)
        config = presets.resolve(preset or PRESETS.get(name, "gguf_q5_1"))
        with proving_here():
            report = quantize(model_dir, folder / "out", config, "gguf", "fake_quantized")
        return model_dir, report, folder / "out/gguf"

    return write


USUAL = ("llama", "qwen3_moe", "gemma3_text", "odd")


@pytest.mark.parametrize("name", with_usual(VARIANTS, USUAL))
def test_the_file_alone_is_the_model_that_was_written(written, name):
    _, report, folder = written(name)
    found, plain = read_model(folder), read_local(folder.parent / "fake_quantized")
    assert found.quantized.export == "gguf" and found.headers.main_dtype == plain.main_dtype
    assert {tensor: header.shape for tensor, header in found.headers.tensors.items()} == {
        tensor: header.shape for tensor, header in plain.tensors.items()
    }
    rounded = load_file(folder.parent / "fake_quantized/model.safetensors")
    for tensor in plain.tensors:
        if tensor in rounded:  # experts are in stacks there
            assert torch.equal(open_source(found).read(tensor).to(rounded[tensor].dtype), rounded[tensor]), tensor
    model, config = quantcore.load(folder / "model.gguf")
    assert measured(model) == pytest.approx(report["summary"]["perplexity_after"], rel=1e-4)
    planned = [layer["name"] for layer in json.loads((folder.parent / "plan.json").read_text())["layers"]]
    assert [layer.name for layer in found.quantized.layers.values()] == planned
    assert all(config.choose(layer, "Linear")[0] for layer in planned)


@pytest.mark.parametrize(
    "name",
    with_usual([name for name in VARIANTS if name != "mistral"], USUAL),  # which is read as the llama that it is
)
def test_config_json_says_what_it_said(written, name):
    model_dir, _, folder = written(name)
    given = AutoConfig.from_pretrained(model_dir).to_dict()
    stored = read_model(folder).headers.config
    found = AutoConfig.for_model(stored.pop("model_type"), **stored).to_dict()
    found["rope_parameters"].pop("attention_factor", None)  # which the file always says
    loose = {"initializer_range", "transformers_version", "_name_or_path", "architectures", "use_cache"}
    loose |= {"router_aux_loss_coef", "bos_token_id"}  # the tokenizer has none
    loose |= {"num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size"} - set(stored)
    differs = {key: (given[key], found.get(key)) for key in given.keys() - loose if given[key] != found.get(key)}
    assert not differs


@pytest.mark.parametrize(
    "preset",
    with_rare(
        [
            "gguf_q2_k",
            "gguf_q3_k",
            "gguf_iq4_xs",
            "gguf_iq2_xxs",
            "gguf_iq3_s",
            "gguf_q4_k",
            "gguf_q5_k",
            "gguf_q6_k",
            "gguf_iq1_s",
            "gguf_iq1_m",
            "gguf_tq1_0",
            "gguf_tq2_0",
            "gguf_mxfp4",
            "gguf_nvfp4",
        ],
        ["gguf_q5_k", "gguf_iq1_s", "gguf_tq1_0", "gguf_nvfp4"],
    ),
)
def test_all_types_are_read(tmp_path, preset):
    model_dir = tiny_model(tmp_path / "model", **WIDE)
    quantize(model_dir, tmp_path / "out", presets.resolve(preset), "gguf", "fake_quantized")
    found, rounded = read_model(tmp_path / "out/gguf"), load_file(tmp_path / "out/fake_quantized/model.safetensors")
    assert all(torch.equal(open_source(found).read(name).bfloat16(), rounded[name]) for name in rounded)


@pytest.mark.slow
def test_it_is_quantized_anew_with_its_own_tokenizer(written, tmp_path):
    model_dir, _, folder = written("llama")
    reports = [
        quantize(path, tmp_path / out, presets.resolve("int8_dynamic"), "quark", "fake_quantized")
        for path, out in ((folder / "model.gguf", "from_gguf"), (folder.parent / "fake_quantized", "from_floats"))
    ]
    one, other = (load_file(tmp_path / out / "quark/model.safetensors") for out in ("from_gguf", "from_floats"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].to(other[name].dtype), other[name]) for name in one)
    assert any("already quantized (gguf)" in line for line in reports[0]["warnings"])
    texts = ["The quick brown fox", "12345", "  def f(x):\n"]
    made, given = map(load_tokenizer, (tmp_path / "from_gguf/quark", model_dir))
    assert [made(text)["input_ids"] for text in texts] == [given(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(("preset", "export"), [("gguf_q4_0", "gptq"), ("gguf_q8_0", "compressed_tensors")])
def test_what_another_format_holds_as_it_is_is_converted(tmp_path, preset, export):
    model_dir = tiny_model(tmp_path / "model", model_type="qwen2")
    report = quantize(model_dir, tmp_path / "out", presets.resolve(preset, exclude=("lm_head",)), "gguf")
    summary = convert(tmp_path / "out/model.gguf", tmp_path / "new", export, lambda event: None)
    assert summary["from"] == "gguf" and (tmp_path / "new/tokenizer.json").exists()
    model, _ = quantcore.load(tmp_path / "new")
    assert measured(model) == pytest.approx(report["summary"]["perplexity_after"], rel=1e-4)


def test_what_no_other_format_holds_is_refused(written, tmp_path, capsys):
    _, _, folder = written("odd")
    assert main(["convert", str(folder / "model.gguf"), str(tmp_path / "new"), "--to", "awq"]) == 1
    assert "zero points are stored as whole numbers" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def rewrite(source, target, types, blobs=None):
    """The file as others write it: tensors named in ``types`` in another of gguf's types, or the bytes of ``blobs``."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        kind = types.get(tensor.name, tensor.tensor_type)
        data = tensor.data
        if kind != tensor.tensor_type:
            data = quants.quantize(quants.dequantize(data, tensor.tensor_type), kind)
        if blobs and tensor.name in blobs:
            kind, data = GGMLQuantizationType[blobs[tensor.name][0]], blobs[tensor.name][1]
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_embeddings_in_blocks_are_read_as_floats_and_not_converted(written, tmp_path):
    """As llama.cpp's own tool writes them."""
    _, _, folder = written("llama", preset="gguf_q4_0")
    kind = GGMLQuantizationType.Q8_0
    other = rewrite(folder / "model.gguf", tmp_path / "other.gguf", {"token_embd.weight": kind})
    found = read_model(other)
    assert set(found.quantized.embeddings) == {"model.embed_tokens.weight"}
    given = open_source(read_model(folder)).read("model.embed_tokens.weight")
    read = open_source(found).read("model.embed_tokens.weight")
    assert read.dtype == torch.bfloat16 and (read - given).norm() < 0.01 * given.norm()
    model, config = quantcore.load(other)
    assert torch.equal(model.model.embed_tokens.weight, read)
    assert config.choose("model.embed_tokens", "Embedding")[0] is None
    with pytest.raises(ConfigError, match="stores embeddings in the model's float dtype"):
        convert(other, tmp_path / "new", "gptq", lambda event: None)


def test_a_model_with_codes_in_its_embedding_alone_is_one_of_floats(written, tmp_path):
    _, _, folder = written("llama")
    tensors = GGUFReader(folder / "model.gguf").tensors
    kinds = {tensor.name: GGMLQuantizationType.F16 for tensor in tensors if len(tensor.shape) > 1}
    kinds["token_embd.weight"] = GGMLQuantizationType.Q8_0
    found = read_model(rewrite(folder / "model.gguf", tmp_path / "embedding.gguf", kinds))
    [line] = [line for line in found.headers.warnings if "read as floats" in line]
    assert line == "1 tensor(s) are quantized already and are read as floats: Q8_0."
    given = open_source(read_model(folder)).read("model.embed_tokens.weight").float()
    read = open_source(found).read("model.embed_tokens.weight").float()
    assert found.quantized is None and read.shape == given.shape and (read - given).norm() < 0.01 * given.norm()


def test_a_float_file_is_a_float_model(written, tmp_path):
    _, _, folder = written("gemma2")
    tensors = GGUFReader(folder / "model.gguf").tensors
    kinds = {tensor.name: GGMLQuantizationType.F16 for tensor in tensors if "norm" not in tensor.name}
    found = read_model(rewrite(folder / "model.gguf", tmp_path / "f16.gguf", kinds))
    assert found.quantized is None and found.headers.main_dtype == "F16" and found.headers.config["dtype"] == "float16"
    rounded = load_file(folder.parent / "fake_quantized/model.safetensors")
    for name, tensor in rounded.items():
        torch.testing.assert_close(open_source(found).read(name).float(), tensor.float(), rtol=2**-8, atol=1e-6)


def damaged(data, *edits):
    for start, new in edits:
        data = data[:start] + new + data[start + len(new) :]
    return data


BROKEN = {
    "does not start": lambda data: b"GGML" + data[4:],
    "version": lambda data: damaged(data, (4, struct.pack("<I", 9))),
    "declares": lambda data: damaged(data, (8, struct.pack("<Q", 1 << 40))),
    "wrong length": lambda data: damaged(data, (24, struct.pack("<Q", 1 << 62))),
    "ends before the data": lambda data: data[:-4000],
    "header has the wrong length": lambda data: data[:3000],
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_file_says_what_is_wrong(written, tmp_path, case):
    _, _, folder = written("llama")
    file = tmp_path / "model.gguf"
    file.write_bytes(BROKEN[case]((folder / "model.gguf").read_bytes()))
    with pytest.raises(ModelError, match=case) as caught:
        read_model(file)
    assert caught.value.code == "invalid_gguf" and caught.value.hint


def norm_in_blocks(data):
    """A piece of the header, and the same with a vector of blocks."""
    start = data.index(b"output_norm.weight") + 18
    piece = data[start - 18 : start + 16]
    return piece, piece[:-4] + struct.pack("<I", 8)


def test_types_and_architectures_that_are_not_known_are_named(written, tmp_path):
    _, _, folder = written("llama")
    data = (folder / "model.gguf").read_bytes()
    at = data.index(b"blk.0.attn_k.weight") + 19 + 4 + 16
    (tmp_path / "iq2.gguf").write_bytes(damaged(data, (at, struct.pack("<I", 15))))
    with pytest.raises(ModelError, match="GGUF type Q8_K") as caught:
        read_model(tmp_path / "iq2.gguf")
    assert caught.value.code == "unsupported_quantization" and "Q6_K" in caught.value.hint
    (tmp_path / "norm.gguf").write_bytes(data.replace(*norm_in_blocks(data)))
    with pytest.raises(ModelError, match=r"rows of 'output_norm\.weight' are not whole blocks"):
        read_model(tmp_path / "norm.gguf")
    (tmp_path / "arch.gguf").write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0falco", 1))
    with pytest.raises(ModelError, match="architecture 'falco'"):
        read_model(tmp_path / "arch.gguf")
    (tmp_path / "place.gguf").write_bytes(data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_z.weight"))
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_z\.weight' in place\.gguf does not belong"):
        read_model(tmp_path / "place.gguf")


def test_frequencies_that_are_none_of_llama3s_are_refused(tmp_path):
    model_dir = tiny_model(tmp_path / "model", head_dim=32, rope_parameters=LLAMA3)
    quantize(model_dir, tmp_path / "out", presets.resolve("gguf_q8_0"), "gguf")
    with pytest.raises(ModelError, match=r"differently from Llama 3\.1 to 3\.3"):
        read_model(tmp_path / "out")


def test_long_lists_are_passed_over_and_numbers_are_short(written):
    _, _, folder = written("llama")
    header = read_gguf_header(folder / "model.gguf")
    theirs = GGUFReader(folder / "model.gguf")
    assert header.fields["llama.attention.layer_norm_rms_epsilon"] == 1e-06
    assert {name: tensor.begin for name, tensor in header.tensors.items()} == {
        tensor.name: int(tensor.data_offset) for tensor in theirs.tensors
    }
    kept = {name: value for name, value in header.fields.items() if value is not None}
    assert all(theirs.fields[name].contents() == pytest.approx(value) if isinstance(value, float) else
               theirs.fields[name].contents() == value for name, value in kept.items())  # fmt: skip
    for number in (0.1, 3.4028234663852886e38, -0.0, 1e-45, float("inf")):
        rounded = struct.unpack("<f", struct.pack("<f", number))[0]
        assert struct.pack("<f", shortest(rounded)) == struct.pack("<f", number)
    assert shortest(struct.unpack("<f", struct.pack("<f", 0.1))[0]) == 0.1 and LONGEST_KEPT > 512


def test_a_split_file_is_the_model_of_its_parts(written, tmp_path):
    """By its first part, and by the folder; tokenizer, weights and the identity of its bytes come from all parts."""
    _, _, folder = written("llama")
    first = split(folder / "model.gguf", tmp_path / "parts", max_tensors=7)
    parts = sorted(first.parent.iterdir())
    assert len(parts) > 3 and first.name == f"tiny-00001-of-0000{len(parts)}.gguf"
    whole = read_model(folder)
    for path in (first, first.parent):
        found = read_model(path)
        assert (
            found.headers.tensors.keys() == whole.headers.tensors.keys()
            and found.headers.config == whole.headers.config
        )
        expected, tensors = open_source(whole), open_source(found)
        assert all(torch.equal(expected.read(name), tensors.read(name)) for name in whole.headers.tensors)
    assert load_tokenizer(first).get_vocab() == load_tokenizer(folder).get_vocab()
    before = identity_of(first)
    data = bytearray(parts[-1].read_bytes())
    data[-40] ^= 1
    parts[-1].write_bytes(data)
    assert identity_of(first) != before


def test_what_is_wrong_with_parts_is_said(written, tmp_path):
    _, _, folder = written("llama")
    first = split(folder / "model.gguf", tmp_path / "parts", max_tensors=7)
    second, third = sorted(first.parent.iterdir())[1:3]

    def refusal(path):
        with pytest.raises(ModelError) as refused:
            read_model(path)
        assert refused.value.code == "missing_shard"
        return f"{refused.value.message} {refused.value.hint}"

    assert "Give the first part" in refusal(second)
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    assert f"{second.name} is not a part of the same model" in refusal(first)
    second.unlink()
    assert f"{second.name}, part 2 of" in refusal(first)
    second.write_bytes(kept)
    other = first.with_name("other.gguf")
    first.rename(other)
    assert "Give the first part" in refusal(other)
