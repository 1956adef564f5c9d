"""Goals: what they accept, and what a job with one must leave open."""

import math

import pytest

from quantcore.config.goal import Goal, parse_duration, parse_recovery, parse_tokens
from quantcore.config.job_spec import NO_SCHEME, JobSpec
from quantcore.config.presets import resolve
from quantcore.config.quantization import Config
from quantcore.config.target_devices import device_of
from quantcore.errors import ConfigError

NOTHING = Config(global_quant_config=NO_SCHEME)


def test_the_default_keeps_what_a_faithful_result_keeps() -> None:
    assert Goal(runtime="vllm", device="h100").max_divergence == pytest.approx(0.0202, abs=1e-4)
    assert Goal(runtime="vllm", device="h100", min_recovery="best").max_divergence is None
    assert Goal(runtime="vllm", device="h100", max_size="1.5GB").max_bytes == 1_500_000_000


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"device": "h1000"}, "unknown_device", "/goal/device"),
        ({"device": "24 potatoes"}, "unknown_device", "/goal/device"),
        ({"max_size": "much"}, "invalid_max_size", "/goal/max_size"),
        ({"max_size": 0}, "invalid_goal", "/goal/max_size"),
    ],
)
def test_a_bad_goal_says_which_field(fields: dict[str, object], code: str, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Goal.model_validate({"runtime": "vllm", "device": "h100"} | fields)
    assert (refused.value.code, refused.value.field) == (code, field)


def test_devices_are_names_or_sizes() -> None:
    assert device_of("H100").memory_bytes == 80_000_000_000
    assert "fp8" in device_of("h100").computes and "fp8" not in device_of("24GB").computes
    assert device_of("24GB").memory_bytes == 24_000_000_000
    with pytest.raises(ConfigError) as refused:
        device_of("rtx409")
    assert "rtx4090" in refused.value.hint


def test_flags_are_read() -> None:
    assert parse_recovery("99%") == parse_recovery("0.99") == 0.99
    assert (parse_tokens("32k"), parse_tokens("4096")) == (32768, 4096)
    assert (parse_duration("90s"), parse_duration("30min"), parse_duration("1.5h")) == (90, 1800, 5400)
    for parse, text in ((parse_recovery, "100%"), (parse_recovery, "good"), (parse_tokens, "0"), (parse_duration, "2")):
        with pytest.raises(ConfigError) as refused:
            parse(text)
        assert refused.value.code == "invalid_goal" and text in refused.value.message


@pytest.mark.parametrize(
    ("fields", "conflict"),
    [
        ({"config": resolve("w4a16")}, "config"),
        ({"config": NOTHING, "file2file": True}, "file2file"),
        ({"config": NOTHING, "evaluation": {"num_windows": 0}}, "evaluation"),
    ],
)
def test_what_a_goal_chooses_is_said_by_nothing_else(fields: dict[str, object], conflict: str) -> None:
    with pytest.raises(ConfigError) as refused:
        JobSpec.model_validate({"goal": Goal(runtime="vllm", device="h100")} | fields)
    assert (refused.value.code, refused.value.field) == ("conflicting_goal", f"/{conflict}")


def test_a_spec_with_a_goal_comes_back_from_its_row() -> None:
    spec = JobSpec(config=NOTHING, goal=Goal(runtime="llama_cpp", device="cpu", max_size="90MB"))
    assert JobSpec.model_validate(spec.to_dict()) == spec
    assert math.isclose(spec.goal.max_divergence or 0, -math.log(0.98))
