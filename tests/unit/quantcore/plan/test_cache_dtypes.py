"""Dtypes of a KV cache that a job measures: refused by headers alone where they do not fit, and their memory."""

import pytest
import torch

from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.layout import TensorHeader
from quantcore.config import presets
from quantcore.config.cache_dtypes import CACHE_DTYPES
from quantcore.config.goal import Goal
from quantcore.config.job_spec import Evaluation, JobSpec
from quantcore.engine.evaluation.cache_rounding import stored
from quantcore.errors import ConfigError
from quantcore.plan.planner import make_plan

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip


def header(*shape: int) -> TensorHeader:
    return TensorHeader("BF16", shape, "model.safetensors", 0, 2 * torch.Size(shape).numel())


def plan(*names: str, preset: str = "int8_weight_only", kv_cache: str | None = None, **config):
    tensors = {"model.embed_tokens.weight": header(1000, 256), "lm_head.weight": header(1000, 256)}
    for block in range(2):
        for name, rows in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128), ("o_proj", 256)):
            tensors[f"model.layers.{block}.self_attn.{name}.weight"] = header(rows, 256)
    evaluation = Evaluation(num_windows=16, seq_len=512, num_prompts=0, num_answers=0, kv_cache_dtypes=names)
    scheme = presets.resolve(preset) if kv_cache is None else presets.with_kv_cache(presets.resolve(preset), kv_cache)
    spec = JobSpec(config=scheme, evaluation=evaluation, export=("quark",))
    return make_plan(spec, ModelHeaders({**LLAMA, **config}, tensors))


@pytest.mark.parametrize("size", [32, 48, 80, 96, 128])
def test_a_dtype_fits_the_heads_that_can_be_rounded_to_it(size):
    for dtype in CACHE_DTYPES.values():
        try:
            stored(torch.ones(1, 1, 2, size), dtype, are_keys=True)
            is_rounded = True
        except ConfigError as error:
            assert error.code == "cache_dtype_does_not_fit"
            is_rounded = False
        assert dtype.fits(size) == is_rounded, dtype.name


def test_a_dtype_that_does_not_fit_the_heads_is_refused_with_those_that_do():
    assert plan("q8_0", "turboquant_3bit_nc").layers
    with pytest.raises(ConfigError, match=r"have 48 channels, which llama\.cpp cannot keep in a KV cache of") as caught:
        plan("fp8", "q8_0", head_dim=48)
    error = caught.value
    assert (error.code, error.field) == ("cache_dtype_does_not_fit", "/evaluation/kv_cache_dtypes")
    assert (
        list(error.allowed) == [name for name, each in CACHE_DTYPES.items() if each.fits(48)] and "fp8" in error.allowed
    )
    assert "These fit: fp8, fp8_e5m2" in error.hint
    with pytest.raises(ConfigError, match="64 and 48 channels"):
        plan("q8_0", global_head_dim=48)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "only causal language models keep one, and it is BertForMaskedLM"),
        ({"architectures": ["LlamaModel"]}, "only causal language models keep one"),
        ({"is_encoder_decoder": True}, "only causal language models keep one"),
        ({"kv_lora_rank": 64}, "multi-head latent attention"),
        ({"kv_cache": "fp8"}, r"this job quantizes the KV cache itself \(first model\.layers\.0\.self_attn\.k_proj\)"),
    ],
)
def test_a_model_without_such_a_cache_is_refused_with_the_reason(changes, why):
    with pytest.raises(ConfigError, match=why) as caught:
        plan("fp8", **changes)
    assert (caught.value.code, caught.value.field) == ("cache_dtypes_not_measured", "/evaluation/kv_cache_dtypes")
    assert plan(**changes).layers, "without the option nothing changes"


def test_each_dtype_takes_one_more_stream_of_hidden_states():
    usual, one, three = plan(), plan("fp8"), plan("fp8", "q8_0", "q4_0")
    states = 16 * 512 * 256 * 2
    assert usual.footprint.kv_caches == 0
    assert three.footprint.kv_caches - one.footprint.kv_caches == 2 * states
    assert one.footprint.kv_caches - states == 12 * 4 * 512 * 128, "12 copies of a window's keys in float32"
    parts = [each.footprint.verifying(runs_model=True) for each in (usual, three)]
    assert "kv_caches" not in parts[0] and parts[1]["kv_caches"] == three.footprint.kv_caches
    assert one.to_dict().keys() == usual.to_dict().keys()
    assert three.footprint.streamed() == usual.footprint.streamed(), "quantizing takes what it took"


def spec(evaluation: Evaluation, **options):
    return JobSpec(config=presets.resolve("int8_weight_only"), evaluation=evaluation, **options)


def test_dtypes_are_refused_where_nothing_is_measured():
    asked = Evaluation(kv_cache_dtypes=("fp8",))
    with pytest.raises(ConfigError, match="but file2file turns all measurements off") as caught:
        spec(asked, file2file=True)
    assert caught.value.field == "/evaluation/kv_cache_dtypes"
    with pytest.raises(ConfigError, match=r"but num_windows 0 \(--skip_evaluation\) turns"):
        spec(asked.model_copy(update={"num_windows": 0}))
    with pytest.raises(ConfigError, match="chooses how the KV cache is kept") as caught:
        spec(asked, goal=Goal(runtime="vllm", device="24GB"))
    assert caught.value.code == "conflicting_goal"


def test_names_are_checked_at_once_and_absent_from_what_did_not_ask():
    with pytest.raises(ConfigError, match="Unknown dtype of the KV cache 'q8'") as caught:
        Evaluation(kv_cache_dtypes=("fp8", "q8"))
    assert "Did you mean 'q8_0'?" in caught.value.hint
    assert "kv_cache_dtypes" not in spec(Evaluation()).to_dict()["evaluation"]
    assert spec(Evaluation(kv_cache_dtypes=("vllm",))).to_dict()["evaluation"]["kv_cache_dtypes"] == ["vllm"]
