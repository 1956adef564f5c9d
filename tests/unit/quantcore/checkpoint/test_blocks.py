"""Where the decoder blocks are: told from names, shapes and config.json as models are published."""

import pytest

from quantcore.checkpoint.blocks import Blocks, find_blocks, warn_of_other_parts
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.layout import TensorHeader
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.errors import ModelError
from quantcore.plan.planner import make_plan

VISION = {"model_type": "clip_vision_model", "hidden_size": 64, "num_hidden_layers": 24}


def blocks(prefix, count, width, start=0):
    names = [f"{prefix}{index}.fc.weight" for index in range(start, start + count)]
    return {name: TensorHeader("BF16", (2 * width, width), "model.safetensors", 0, 4 * width * width) for name in names}


LLAVA = {**blocks("vision_tower.vision_model.encoder.layers.", 24, 64), **blocks("language_model.model.layers.", 6, 32)}
FOUND = {
    "nested": (
        {"text_config": {"num_hidden_layers": 6, "hidden_size": 32}, "vision_config": VISION}, LLAVA,
        "language_model.model.layers.", 6,
    ),
    "nested, with the defaults of the class left out": (
        {"text_config": {"model_type": "llama"}, "vision_config": VISION}, LLAVA, "language_model.model.layers.", 6,
    ),
    "flat, with a vision_config": (
        {"num_hidden_layers": 6, "hidden_size": 32, "vision_config": {"depth": 24, "hidden_size": 64}},
        {**blocks("visual.blocks.", 24, 64), **blocks("model.layers.", 6, 32)}, "model.layers.", 6,
    ),
    "a tower of the same depth and an unknown name": (
        {"llm_config": {"num_hidden_layers": 6, "hidden_size": 32}},
        {**blocks("eyes.layers.", 6, 64), **blocks("model.layers.", 6, 32)}, "model.layers.", 6,
    ),
    "a tower of the same width and an unknown name": (
        {"language_config": {"num_hidden_layers": 6, "hidden_size": 64}},
        {**blocks("eyes.layers.", 24, 64), **blocks("model.layers.", 6, 64)}, "model.layers.", 6,
    ),
    "nested twice": (
        {"thinker_config": {"text_config": {"num_hidden_layers": 6, "hidden_size": 32}, "audio_config": VISION}},
        {**blocks("thinker.audio_tower.layers.", 24, 64), **blocks("thinker.model.layers.", 6, 32),
         **blocks("talker.model.layers.", 6, 32)},
        "thinker.model.layers.", 6,
    ),
    "multi-token prediction inside": (
        {"text_config": {"num_hidden_layers": 5, "num_nextn_predict_layers": 1, "hidden_size": 32}},
        blocks("language_model.model.layers.", 6, 32), "language_model.model.layers.", 5,
    ),
    "a decoder that reads pictures": (
        {"text_config": {"num_hidden_layers": 6, "hidden_size": 32}},
        {**blocks("vision_model.encoder.layers.", 6, 32), **blocks("language_model.model.decoder.layers.", 6, 32)},
        "language_model.model.decoder.layers.", 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_the_text_model_is_found(case):
    config, tensors, prefix, count = FOUND[case]
    assert find_blocks(tensors, config).lists == ((prefix, count),)


ENCODER_DECODER = {**blocks("encoder.block.", 6, 32), **blocks("decoder.block.", 6, 32)}
T5 = {"is_encoder_decoder": True, "num_layers": 6, "num_decoder_layers": 4, "d_model": 32}
DECODER = blocks("model.decoder.layers.", 4, 32)
WHISPER = {
    **blocks("model.encoder.layers.", 6, 32), **DECODER,
    "model.encoder.conv1.weight": TensorHeader("BF16", (32, 80, 3), "model.safetensors", 0, 15360),
}  # fmt: skip


def test_an_encoder_comes_before_its_decoder():
    found = find_blocks({**blocks("encoder.block.", 6, 32), **blocks("decoder.block.", 4, 32)}, T5)
    assert found.lists == (("encoder.block.", 6), ("decoder.block.", 4)) and len(found) == 10
    assert [found.prefix_of(index) for index in (0, 5, 6, 9)] == [
        "encoder.block.0.", "encoder.block.5.", "decoder.block.0.", "decoder.block.3.",
    ]  # fmt: skip
    named = {"encoder.block.5.x": 5, "decoder.block.0.x": 6, "decoder.block.3.x": 9, "decoder.block.4.x": 10}
    assert {name: found.number_of(name) for name in (*named, "shared.weight")} == {**named, "shared.weight": None}
    with pytest.raises(IndexError):
        found.prefix_of(10)


def test_an_encoder_that_hears_is_left_alone():
    config = {"is_encoder_decoder": True, "encoder_layers": 6, "decoder_layers": 4, "d_model": 32}
    assert find_blocks(WHISPER, config).lists == (("model.decoder.layers.", 4),)
    silent = {name: tensor for name, tensor in WHISPER.items() if "conv1" not in name}
    assert find_blocks(silent, config).lists == (("model.encoder.layers.", 6), ("model.decoder.layers.", 4))


def test_the_name_of_a_model_is_no_part_that_hears():
    prefixed = {f"speecht5.{name.removeprefix('model.')}": tensor for name, tensor in WHISPER.items()}
    config = {"is_encoder_decoder": True, "encoder_layers": 6, "decoder_layers": 4, "d_model": 32}
    assert find_blocks(prefixed, config).lists == (("speecht5.decoder.layers.", 4),)
    with pytest.raises(ModelError, match=r"these are none: 'speech_model\.layers"):
        find_blocks(blocks("speech_model.layers.", 6, 32), config)


def test_an_encoder_may_have_a_config_of_its_own():
    config = {
        "is_encoder_decoder": True, "encoder_config": {"hidden_size": 16, "num_hidden_layers": 3},
        "decoder_config": {"hidden_size": 32, "num_hidden_layers": 4},
    }  # fmt: skip
    found = find_blocks({**blocks("model.encoder.layers.", 3, 16), **DECODER}, config)
    assert found.lists == (("model.encoder.layers.", 3), ("model.decoder.layers.", 4))


def test_lists_that_take_turns_are_taken_together():
    lists = {**blocks("x.attentions.", 6, 32), **blocks("x.ffns.", 6, 32), **blocks("x.other.", 3, 32)}
    found = find_blocks(lists, {"n_layers": 6, "emb_dim": 32})
    assert found == Blocks((("x.attentions.", 6), ("x.ffns.", 6)), take_turns=True)
    two_models = {**blocks("x.attentions.", 6, 32), **blocks("model.layers.", 6, 32)}
    with pytest.raises(ModelError, match="several lists"):
        find_blocks(two_models, {"n_layers": 6, "emb_dim": 32})


def test_layers_in_a_list_are_no_blocks():
    """MusicGen has an embedding and a head for each codebook, as many as blocks here."""
    head = TensorHeader("BF16", (64, 32), "model.safetensors", 0, 4096)
    heads = {f"lm_heads.{index}.weight": head for index in range(6)}
    config = {"num_hidden_layers": 6, "hidden_size": 32}
    assert find_blocks({**heads, **blocks("model.layers.", 6, 32)}, config).lists == (("model.layers.", 6),)


REFUSED = {
    "two decoders": (
        {"is_encoder_decoder": True, "num_layers": 6, "d_model": 32},
        {**ENCODER_DECODER, **blocks("decoder.other.", 6, 32)},
        "an encoder and a decoder",
    ),
    "two that fit": (
        {"num_layers": 6, "d_model": 32},
        ENCODER_DECODER,
        r"several lists .*'decoder.block.\*' \(6 blocks",
    ),
    "two and none that fits": ({"num_hidden_layers": 9}, ENCODER_DECODER, "several lists"),
    "a tower alone": (
        {"hidden_size": 64},
        blocks("vision_tower.layers.", 6, 64),
        "these are none: 'vision_tower.layers",
    ),
    "no list": ({"hidden_size": 64}, {"fc.weight": blocks("x.", 1, 64)["x.0.fc.weight"]}, "no tensor name has a block"),
    "another depth": ({"num_hidden_layers": 7}, blocks("model.layers.", 6, 32), "declares 7 blocks, .* contain 6"),
    "another width": ({"num_layers": 6, "hidden_size": 48}, blocks("model.layers.", 6, 32), "declares 6 .* contain 6"),
    "a hole": ({"num_layers": 6}, blocks("model.layers.", 6, 32, start=1), "a shard is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_one_language_model_is_refused_with_the_reason(case):
    config, tensors, reason = REFUSED[case]
    with pytest.raises(ModelError, match=reason) as caught:
        find_blocks(tensors, config)
    assert caught.value.hint
    implausible = case in ("another depth", "another width", "a hole")
    assert caught.value.code == ("config_implausible" if implausible else "unsupported_architecture")


def test_a_plan_says_which_parts_it_leaves_alone():
    config, tensors, prefix, _ = FOUND["nested"]
    plan = make_plan(
        JobSpec(config=presets.resolve("int8_weight_only"), file2file=True),
        ModelHeaders({**config, "model_type": "llava"}, tensors),
    )
    assert len(plan.layers) == 6 and plan.blocks.prefixes == (prefix,)
    [warning] = plan.warnings
    assert "Only the language model, 'language_model.model.layers.*', is quantized." in warning
    assert "stay unchanged: 'vision_tower.vision_model.encoder.layers.*' (24 blocks" in warning
    assert {entry.reason for entry in plan.kept if entry.name.startswith("vision")} == {
        "part outside the language model"
    }


def test_nothing_is_said_where_nothing_is_left():
    small = {"heads.0.weight": TensorHeader("BF16", (2, 2), "model.safetensors", 0, 8)}
    assert warn_of_other_parts(blocks("model.layers.", 6, 32) | small, Blocks((("model.layers.", 1),))) == ()
