"""What runs where, and what fits."""

import pytest

from quantcore.config.goal import RUNTIMES, Goal
from quantcore.config.presets import KV_CACHE_SPECS, PRESETS
from quantcore.config.target_devices import DEVICES
from quantcore.errors import ConfigError
from quantcore.export import formats_for
from quantcore.plan.runtimes import SUPPORTED_SCHEMES, kv_cache_bytes, kv_cache_scheme, schemes_for, weight_limit_bytes

LLAMA_3_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
}  # fmt: skip


def goal(**fields: object) -> Goal:
    return Goal.model_validate({"runtime": "vllm", "device": "h100"} | fields)


def test_every_row_of_the_table_can_be_written() -> None:
    assert {*SUPPORTED_SCHEMES} == {*RUNTIMES}
    computed = set().union(*(device.computes for device in DEVICES.values()))
    for menu in SUPPORTED_SCHEMES.values():
        assert {*menu.kv_cache} <= {*KV_CACHE_SPECS} and {*menu.kv_cache.values()} <= computed
        names = {scheme.preset for scheme in menu.schemes}
        for scheme in menu.schemes:
            assert not scheme.if_smaller_than or scheme.if_smaller_than in names, scheme
            assert menu.export in formats_for(PRESETS[scheme.preset].config), scheme
            assert not scheme.needs or scheme.needs in computed, scheme


@pytest.mark.parametrize("device", [*DEVICES, "24GB"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_there_is_something_for_every_pair(runtime: str, device: str) -> None:
    assert schemes_for(goal(runtime=runtime, device=device))


def test_schemes_follow_the_device() -> None:
    def names(**fields: object) -> list[str]:
        return [scheme.preset for scheme in schemes_for(goal(**fields))]

    assert "fp8_dynamic" in names() and "int8_dynamic" in names()
    assert "fp8_dynamic" not in names(device="a100")
    assert "nvfp4" in names(device="b200") and "mxfp4" in names(device="mi350")
    assert names(device="24GB") == ["w4a16", "int8_weight_only"]
    assert (kv_cache_scheme(goal()), kv_cache_scheme(goal(device="a100"))) == ("fp8", None)


def test_the_cache_of_llama_3_8b_takes_128_kib_a_token() -> None:
    """As its paper's grouped queries give: 2 x 32 layers x 8 heads x 128 numbers x 2 bytes."""
    assert kv_cache_bytes(LLAMA_3_8B, 1) == 131072
    assert kv_cache_bytes({"text_config": LLAMA_3_8B}, 8192) == 1 << 30
    deepseek_v3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}
    assert kv_cache_bytes(deepseek_v3, 1) == 61 * 576 * 2


def test_weights_get_what_the_cache_leaves() -> None:
    assert weight_limit_bytes(goal(device="24GB"), 1_600_000_000) == 20_000_000_000
    assert weight_limit_bytes(goal(device="24GB", max_size="4GB"), 0) == 4_000_000_000
    assert weight_limit_bytes(goal(device="cpu"), 10**12) is None


def test_a_device_that_computes_nothing_of_a_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    menu = SUPPORTED_SCHEMES["vllm"]
    monkeypatch.setitem(SUPPORTED_SCHEMES, "vllm", type(menu)(menu.export, menu.schemes[-1:], {}))
    with pytest.raises(ConfigError) as refused:
        schemes_for(goal(device="t4"))
    assert refused.value.code == "nothing_runs_there"
