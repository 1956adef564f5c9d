"""Every combination of the vocabulary: what is legal quantizes well, what is not is refused by the name of a field."""

import itertools
import re

import pytest
import torch

from quantcore.config.grouping import activation_grouping, weight_grouping
from quantcore.config.quantization import Dtype, QSchemeType, QuantizationConfig, QuantizationSpec, ScaleType
from quantcore.engine.observers import observer_for
from quantcore.errors import ConfigError
from quantcore.tensors.affine import fake_quantize, fake_quantize_activation, find_params
from quantcore.tensors.qtensor import quantize_weight

SIZES = {
    QSchemeType.per_group: {"group_size": 16},
    QSchemeType.per_block: {"block_size": (16, 24)},
}
BLOCKS_OF_32 = (Dtype.iq1_s, Dtype.iq2_xxs, Dtype.iq3_xxs, Dtype.iq3_s)
FIELDS = (*QuantizationSpec.__dataclass_fields__, *QuantizationConfig.__dataclass_fields__)
COMBINATIONS = list(itertools.product(Dtype, QSchemeType, (True, False), (True, False), ScaleType))
LARGEST_ERROR = {2: 1.0, 3: 0.6, 4: 0.35, 5: 0.2, 6: 0.15, 8: 0.1, 16: 0.02}
"""Of ||x - q|| / ||x|| for normal values and the coarsest scheme, by the bits of the format. Two bits per tensor hardly
reach beyond zero; e4m3 scales cut up to 6 % from the largest value, whatever the format."""


def build(dtype, scheme, symmetric, is_dynamic, scale_type):
    element = {"mx_element_dtype": "fp4"} if dtype is Dtype.mx else {}
    sizes = {} if dtype is Dtype.mx else SIZES.get(scheme, {})
    return QuantizationSpec(
        dtype=dtype,
        qscheme=scheme,
        symmetric=symmetric,
        is_dynamic=is_dynamic,
        scale_type=scale_type,
        **sizes,
        **element,
    )


def made(combination):
    try:
        return build(*combination)
    except ConfigError:
        return None


def must_be_legal(dtype, scheme, symmetric, is_dynamic, scale_type):
    """The rules again, said another way: integers may be asymmetric, unsigned ones must; casts have no scales."""
    if dtype is Dtype.mx:
        return symmetric
    name = dtype.value
    if name in ("float16", "bfloat16"):
        return symmetric and scheme == "per_tensor" and scale_type == "float"
    if name.startswith("uint") if symmetric else "int" not in name:
        return False
    if name.startswith("iq1") or scale_type == "odd3":
        return (name, scheme, symmetric, is_dynamic, scale_type) == ("iq1_m", "per_group", True, False, "odd3")
    if name.startswith(("iq2", "iq3")) or scale_type == "odd4":  # GGUF's vectors: of this size two
        fits = (scheme, symmetric, is_dynamic, scale_type) == ("per_group", True, False, "odd4")
        return fits and name in ("iq2_xs", "iq2_s")
    if scale_type == "double_quant":  # of bitsandbytes' blocks of 4 bits
        return (name in ("nf4", "fp4_bnb"), scheme, is_dynamic) == (True, "per_group", False)
    if scale_type in ("uint4", "uint6", "int6", "int8"):  # GGUF's K-types: of this size and zero points two
        return (scheme, symmetric, is_dynamic) == ("per_group", True, False) and (name, scale_type) in (
            ("int6", "int8"),
            ("int3", "int6"),
        )
    if scale_type == "ue4m3":  # GGUF's NVFP4
        return (name, scheme, symmetric, is_dynamic) == ("fp4", "per_group", True, False)
    if scale_type in ("e8m0", "e4m3") and not symmetric:
        return False
    return scale_type != "e4m3" or scheme == "per_group"


def test_exactly_the_sensible_combinations_are_legal():
    for combination in COMBINATIONS:
        assert (made(combination) is not None) == must_be_legal(*combination), combination


def test_every_refusal_names_a_field_and_what_is_wrong():
    for combination in COMBINATIONS:
        if made(combination) is None:
            with pytest.raises(ConfigError) as caught:
                build(*combination)
            message = caught.value.message
            assert len(message) > 30 and any(re.search(rf"\b{field}\b", message) for field in (*FIELDS, "signed")), (
                message
            )


LEGAL = [(combination, spec) for combination in COMBINATIONS if (spec := made(combination)) is not None]


@pytest.mark.parametrize("dtype", list(Dtype))
def test_weights_of_every_legal_combination(dtype):
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    seen = 0
    for combination, spec in LEGAL:
        if combination[0] is dtype and not spec.is_dynamic and spec.format.scaled:
            if spec.qscheme is QSchemeType.per_group and 48 % spec.group_size:
                weight = weight[:, :32]
            observer = observer_for(spec, weight_grouping(spec))
            observer.update(weight)
            params = find_params(*observer.range(), spec, torch.bfloat16)
            assert params.scale.shape == weight_grouping(spec).num_scales(tuple(weight.shape))
            quantized = quantize_weight(weight, params, spec)
            restored = quantized.dequantize()
            assert quantized.codes.shape == weight.shape and (params.scale > 0).all()
            assert ((weight - restored).norm() / weight.norm()) < LARGEST_ERROR[spec.format.bits], combination
            assert torch.equal(fake_quantize(weight, spec, weight_grouping(spec), params), restored), combination
            seen += 1
    assert seen or dtype in (Dtype.float16, Dtype.bfloat16, *BLOCKS_OF_32)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_activations_of_every_legal_combination(dtype):
    x = torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(2))
    for combination, spec in LEGAL:
        if combination[0] is not dtype:
            continue
        weight = QuantizationSpec(dtype="int8")
        try:
            QuantizationConfig(weight=weight, input_tensors=spec)
        except ConfigError as refused:
            assert "input_tensors" in str(refused), combination
            continue
        if spec.qscheme is QSchemeType.per_group and 48 % spec.group_size:
            x = x[..., :32]
        static = None
        if spec.is_static:
            observer = observer_for(spec, activation_grouping(spec))
            observer.update(x)
            static = find_params(*observer.range(), spec, torch.bfloat16)
        seen = fake_quantize_activation(x, spec, static)
        assert seen.shape == x.shape and seen.dtype == x.dtype
        assert ((x - seen).norm() / x.norm()) < LARGEST_ERROR[spec.format.bits], combination
