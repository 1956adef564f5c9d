"""Caches of fewer bits, beside gguf's own quantizer and by hand; ``tests/consumers/test_cache_dtypes.py`` asks vLLM."""

import gguf
import pytest
import torch

from quantcore.config.cache_dtypes import CACHE_DTYPES, cache_dtypes
from quantcore.engine.evaluation.cache_rounding import _levels, stored
from quantcore.errors import ConfigError


def heads(size, seed=0):
    """Keys [1, 3 heads, 40 tokens, size] in float32 with outliers, a head of zeros, and ties of the largest values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 3, 40, size, generator=generator) * torch.randn(1, 3, 40, 1, generator=generator).exp()
    x[0, 0, 0] = 0
    x[0, 0, 1, ::2], x[0, 0, 1, 1::2] = 2, -2
    return x


def by_gguf(x, name):
    kind = getattr(gguf.GGMLQuantizationType, name.upper())
    read = gguf.quants.dequantize(gguf.quants.quantize(x.flatten(0, -2).contiguous().numpy(), kind), kind)
    return torch.from_numpy(read).view(x.shape)


def hadamard(order):
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / order**0.5


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_blocks_of_llama_cpp_are_those_of_gguf(name):
    x = heads(32)
    assert torch.equal(stored(x, CACHE_DTYPES[name], are_keys=True), by_gguf(x, name))


@pytest.mark.parametrize(("are_keys", "order"), [(True, 128), (False, 64)])
def test_llama_cpp_rotates_heads_that_64_divides(are_keys, order):
    """Keys by the largest power of two that divides the head, values by 64."""
    x = heads(384)
    rotation = torch.block_diag(*[hadamard(order)] * (384 // order))
    expected = by_gguf(x @ rotation, "q4_0") @ rotation
    torch.testing.assert_close(stored(x, CACHE_DTYPES["q4_0"], are_keys=are_keys), expected, rtol=1e-4, atol=1e-4)


def test_iq4_nl_chooses_the_nearest_value_of_its_book():
    x = torch.linspace(-127, 113, 32).expand(1, 1, 1, 32).clone()
    read = stored(x, CACHE_DTYPES["iq4_nl"], are_keys=True)
    scale = read[0, 0, 0, 0] / -127
    book = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])
    nearest = book[(x[0, 0, 0][:, None] - book).abs().argmin(1)]
    torch.testing.assert_close(read[0, 0, 0], nearest * scale)
    assert scale == pytest.approx(1, abs=0.02), "weighted least squares on what was rounded"
    assert not stored(0 * x, CACHE_DTYPES["iq4_nl"], are_keys=True).any()


def test_scales_of_vllm_are_one_or_a_head_s_own():
    x = torch.tensor([1.0, -2.0, 500.0, 0.3]).view(1, 1, 1, 4)
    assert stored(x, CACHE_DTYPES["fp8"], are_keys=True).flatten().tolist() == [1, -2, 448, 0.3125]
    assert stored(1e6 * x, CACHE_DTYPES["fp8_e5m2"], are_keys=True).max() == 57344, "no infinity, as on GPUs"
    scale = 500 / 127
    by_head = stored(x, CACHE_DTYPES["int8_per_token_head"], are_keys=True).flatten()
    torch.testing.assert_close(by_head, scale * torch.tensor([0.0, -1.0, 127.0, 0.0]))
    by_head = stored(x, CACHE_DTYPES["fp8_per_token_head"], are_keys=True).flatten()
    assert by_head[2] == pytest.approx(500)
    assert by_head[0] == pytest.approx(0.875 * 500 / 448)


def test_the_zero_point_of_int4_lies_in_the_scale():
    x = heads(96).bfloat16()
    read = stored(x, CACHE_DTYPES["int4_per_token_head"], are_keys=False)
    assert read.dtype == torch.bfloat16
    error = (read.float() - x.float()).norm() / x.float().norm()
    assert 0.05 < error < 0.15, "a sixteenth of the range of a head, spread by a rotation"


def test_levels_of_turboquant_are_those_of_max():
    """J. Max, "Quantizing for minimum distortion", 1960, table I: 8 levels for a normal variable."""
    expected = torch.tensor([0.2451, 0.7560, 1.344, 2.152])
    torch.testing.assert_close(_levels(3), torch.cat([-expected.flip(0), expected]), rtol=0, atol=5e-4)


def test_turboquant_keeps_the_length_of_keys_and_the_range_of_values():
    x = heads(64)
    keys = stored(x, CACHE_DTYPES["turboquant_3bit_nc"], are_keys=True)
    torch.testing.assert_close(keys.norm(dim=-1), x.norm(dim=-1).half().float(), rtol=1e-4, atol=1e-6)
    values = stored(x, CACHE_DTYPES["turboquant_3bit_nc"], are_keys=False)
    torch.testing.assert_close(values.amax(-1), x.amax(-1), rtol=2e-3, atol=1e-3)
    assert all(len(row.unique()) <= 8 for row in values.flatten(0, 2))
    assert stored(x, CACHE_DTYPES["turboquant_k8v4"], are_keys=True).equal(x.to(torch.float8_e4m3fn).float())
    with pytest.raises(ConfigError, match="96 channels; the Hadamard matrices of TurboQuant need a power of two"):
        stored(heads(96), CACHE_DTYPES["turboquant_3bit_nc"], are_keys=True)


def test_a_head_that_does_not_divide_into_blocks_is_refused():
    with pytest.raises(ConfigError, match="48 channels, which do not divide into the blocks of 32") as caught:
        stored(heads(48), CACHE_DTYPES["q8_0"], are_keys=True)
    assert (caught.value.code, "llama.cpp refuses it as well" in caught.value.hint) == (
        "cache_dtype_does_not_fit",
        True,
    )


def test_dtypes_are_found_by_their_names_and_by_program():
    assert [each.name for each in cache_dtypes(["q4_0", "fp8", "q4_0"])] == ["q4_0", "fp8"]
    assert len(cache_dtypes(["llama_cpp"])) == 6
    assert cache_dtypes(["vllm", "llama_cpp"]) == (*cache_dtypes(["vllm"]), *cache_dtypes(["llama_cpp"]))
    with pytest.raises(ConfigError, match="Unknown dtype of the KV cache 'q8'") as caught:
        cache_dtypes(["q8"])
    assert caught.value.code == "unknown_cache_dtype"
    assert "Did you mean 'q8_0'" in str(caught.value.hint)


def test_options_are_those_of_the_programs():
    assert CACHE_DTYPES["q4_0"].option == "--cache-type-k q4_0 --cache-type-v q4_0"
    assert CACHE_DTYPES["fp8"].option == "--kv-cache-dtype fp8"
