"""Table of the named schemes. A new scheme is one row of ``_TABLE``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap
from typing import Any

from quantcore.config.gguf_types import GGUF_TYPES, MIXES, GgufTypes
from quantcore.config.quantization import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec, ScaleType

PER_TENSOR, PER_CHANNEL, PER_GROUP = QSchemeType.per_tensor, QSchemeType.per_channel, QSchemeType.per_group


def _spec(dtype: str, qscheme: QSchemeType = PER_TENSOR, **settings: Any) -> QuantizationSpec:
    return QuantizationSpec(dtype=Dtype(dtype), qscheme=qscheme, **settings)


def _groups(dtype: str, size: int) -> QuantizationSpec:
    return _spec(dtype, PER_GROUP, group_size=size)


def _mx(element: str, *, dynamic: bool = False) -> QuantizationSpec:
    return _spec(element, PER_GROUP, group_size=32, scale_type=ScaleType.e8m0, is_dynamic=dynamic)


def _nvfp4(*, dynamic: bool = False) -> QuantizationSpec:
    return _spec("fp4", PER_GROUP, group_size=16, scale_type=ScaleType.e4m3, is_dynamic=dynamic)


INT8, INT8_CHANNEL = _spec("int8"), _spec("int8", PER_CHANNEL)
INT8_OUTLIERS = _spec("int8", PER_CHANNEL, is_dynamic=True, symmetric=True, outlier_threshold=6.0)
INT8_TOKEN = _spec("int8", PER_CHANNEL, is_dynamic=True, symmetric=False)
FP8, FP8_DYNAMIC = _spec("fp8_e4m3"), _spec("fp8_e4m3", is_dynamic=True)
FP8_CHANNEL, FP8_TOKEN = _spec("fp8_e4m3", PER_CHANNEL), _spec("fp8_e4m3", PER_CHANNEL, is_dynamic=True)
FP8_BLOCK = _spec("fp8_e4m3", QSchemeType.per_block, block_size=(128, 128))
FP8_GROUP_128 = _spec("fp8_e4m3", PER_GROUP, group_size=128, is_dynamic=True)


@dataclass(frozen=True)
class Preset:
    """A config with a name. ``aliases``: what the quantization script of AMD Quark, or llama.cpp's tool, calls it."""

    name: str
    title: str
    config: Config
    aliases: tuple[str, ...] = ()

    @property
    def layer_config(self) -> QuantizationConfig:
        return self.config.global_quant_config

    @property
    def needs_calibration(self) -> bool:
        return self.config.needs_calibration


def _row(
    name: str,
    title: str,
    weight: QuantizationSpec,
    inputs: QuantizationSpec | None = None,
    aliases: str = "",
    exclude: tuple[str, ...] = ("lm_head",),
    gguf: GgufTypes | None = None,
) -> Preset:
    layer = QuantizationConfig(weight=weight, input_tensors=inputs)
    config = Config(global_quant_config=layer, exclude=exclude, gguf=gguf)
    return Preset(name, title, config, tuple(aliases.split()))


ON_SMALL = ": experimental for small models (SmolLM2-135M: degraded)"
"""The end of a title whose default result was *degraded* on SmolLM2-135M (docs/benchmarks.md, "Presets by effort")."""
UNTRIED = ": try it before you rely on it"

_TABLE = (
    _row("int8_dynamic", "int8 weights per channel, asymmetric int8 activations with one scale a token, found at run "
         "time", INT8_CHANNEL, INT8_TOKEN),
    _row("int8_static", "int8 weights per channel, int8 activations with one calibrated scale a tensor",
         INT8_CHANNEL, INT8, "w_int8_per_channel_a_int8_per_tensor_sym"),
    _row("int8", "int8 weights and activations, one calibrated scale a tensor", INT8, INT8,
         "w_int8_a_int8_per_tensor_sym"),
    _row("int8_weight_only", "int8 weights per channel, activations untouched", INT8_CHANNEL,
         aliases="w_int8_per_channel_sym"),
    _row("int8_weight_only_per_tensor", "int8 weights with one scale a tensor, activations untouched", INT8,
         aliases="w_int8_per_tensor_sym"),
    _row("fp8", "fp8 (e4m3) weights and activations, one calibrated scale a tensor", FP8, FP8, "w_fp8_a_fp8"),
    _row("fp8_dynamic", "fp8 (e4m3) weights per channel, activations per token, found at run time",
         FP8_CHANNEL, FP8_TOKEN, "ptpc_fp8"),
    _row("fp8_block", "fp8 (e4m3) weights in blocks of 128x128, activations in groups of 128, found at run time",
         FP8_BLOCK, FP8_GROUP_128),
    _row("w4a16", "uint4 weights in asymmetric groups of 64, activations untouched" + ON_SMALL, _groups("uint4", 64),
         aliases="w_uint4_per_group_asym uint4_wo_64"),
    _row("uint4_wo_32", "uint4 weights in asymmetric groups of 32", _groups("uint4", 32)),
    _row("uint4_wo_128", "uint4 weights in asymmetric groups of 128", _groups("uint4", 128)),
    _row("uint4_wo_per_channel", "uint4 weights, asymmetric, per channel", _groups("uint4", -1)),
    _row("w4a16_sym", "int4 weights in symmetric groups of 64, activations untouched" + ON_SMALL, _groups("int4", 64),
         aliases="w_int4_per_group_sym int4_wo_64"),
    _row("int4_wo_32", "int4 weights in symmetric groups of 32", _groups("int4", 32)),
    _row("int4_wo_128", "int4 weights in symmetric groups of 128", _groups("int4", 128)),
    _row("int4_wo_per_channel", "int4 weights, symmetric, per channel", _groups("int4", -1),
         aliases="w_int4_per_channel_sym"),
    _row("w3a16", "3-bit weights in asymmetric groups of 64, activations untouched" + UNTRIED,
         _spec("int3", PER_GROUP, group_size=64, symmetric=False)),
    _row("w3a16_sym", "3-bit weights in symmetric groups of 64, activations untouched" + UNTRIED,
         _groups("int3", 64)),
    _row("w2a16", "2-bit weights in asymmetric groups of 64, activations untouched: loses much", _groups("uint2", 64)),
    _row("w2a16_sym", "2-bit weights in symmetric groups of 64, activations untouched: loses much",
         _groups("int2", 64)),
    _row("int4_wa_64", "int4 weights and activations in symmetric groups of 64, those of activations found at run time",
         _groups("int4", 64), _spec("int4", PER_GROUP, group_size=64, is_dynamic=True)),
    _row("int4_fp8", "int4 weights per channel over fp8 per tensor, fp8 activations found at run time" + ON_SMALL,
         _spec("int4", PER_CHANNEL, scale_type=ScaleType.float32, over=_spec("fp8_e4m3", scale_type=ScaleType.float32)),
         FP8_DYNAMIC),
    _row("mxfp4", "MXFP4 weights and activations: experimental (SmolLM2-135M: broken)", _mx("fp4"),
         _mx("fp4", dynamic=True)),
    _row("mxfp4_weight_only", "MXFP4 weights, activations untouched" + ON_SMALL, _mx("fp4")),
    _row("mxfp4_fp8", "MXFP4 weights, fp8 activations with one calibrated scale a tensor", _mx("fp4"), FP8),
    _row("mxfp4_mxfp6_e2m3", "MXFP4 weights, MXFP6 (e2m3) activations", _mx("fp4"), _mx("fp6_e2m3", dynamic=True)),
    _row("mxfp6_e3m2", "MXFP6 (e3m2) weights and activations", _mx("fp6_e3m2"), _mx("fp6_e3m2", dynamic=True)),
    _row("mxfp6_e2m3", "MXFP6 (e2m3) weights and activations", _mx("fp6_e2m3"), _mx("fp6_e2m3", dynamic=True)),
    _row("mxfp8", "MXFP8 (e4m3) weights and activations" + ON_SMALL, _mx("fp8_e4m3"), _mx("fp8_e4m3", dynamic=True),
         "w_mx_fp8_a_mx_fp8"),
    _row("mxfp8_e5m2", "MXFP8 (e5m2) weights and activations", _mx("fp8_e5m2"), _mx("fp8_e5m2", dynamic=True)),
    _row("mxint8", "MXINT8 weights and activations", _mx("int8"), _mx("int8", dynamic=True)),
    _row("mxint8_weight_only", "MXINT8 weights, activations untouched", _mx("int8")),
    _row("nvfp4", "NVFP4 weights and activations: fp4 in groups of 16 with e4m3 scales under one float32 scale"
         + ON_SMALL, _nvfp4(), _nvfp4(dynamic=True), "fp4_block16_scale_e4m3"),
    _row("nvfp4_weight_only", "NVFP4 weights, activations untouched" + ON_SMALL, _nvfp4()),
    _row("nf4", "NF4 weights of bitsandbytes in groups of 64", _groups("nf4", 64)),
    _row("nf4_double_quant", "NF4 weights of bitsandbytes in groups of 64, whose scales are quantized to 8 bits",
         _spec("nf4", PER_GROUP, group_size=64, scale_type=ScaleType.double_quant)),
    _row("llm_int8", "LLM.int8() of bitsandbytes: int8 weights per channel, int8 activations per token, found at run "
         "time, but for features with a value of 6 or more", INT8_CHANNEL, INT8_OUTLIERS),
    _row("fp4_bnb", "FP4 weights of bitsandbytes in groups of 64", _groups("fp4_bnb", 64)),
    _row("fp4_bnb_double_quant", "FP4 weights of bitsandbytes in groups of 64, whose scales are quantized to 8 bits",
         _spec("fp4_bnb", PER_GROUP, group_size=64, scale_type=ScaleType.double_quant)),
    _row("gguf_iq1_s", "GGUF's IQ1_S: vectors of 8 weights from a book of 2048, in blocks of 32: loses much",
         GGUF_TYPES["IQ1_S"], exclude=()),
    _row("gguf_iq1_m", "GGUF's IQ1_M: vectors of 8 weights from a book of 2048, in blocks of 16: loses much",
         GGUF_TYPES["IQ1_M"], exclude=()),
    _row("gguf_iq2_xxs", "GGUF's IQ2_XXS: vectors of 8 weights from a book of 256, in blocks of 32" + UNTRIED,
         GGUF_TYPES["IQ2_XXS"], exclude=()),
    _row("gguf_iq2_xs", "GGUF's IQ2_XS: vectors of 8 weights from a book of 512, in blocks of 16" + UNTRIED,
         GGUF_TYPES["IQ2_XS"], exclude=()),
    _row("gguf_iq2_s", "GGUF's IQ2_S: vectors of 8 weights from a book of 1024, in blocks of 16" + UNTRIED,
         GGUF_TYPES["IQ2_S"], exclude=()),
    _row("gguf_iq3_xxs", "GGUF's IQ3_XXS: vectors of 4 weights from a book of 256, in blocks of 32" + UNTRIED,
         GGUF_TYPES["IQ3_XXS"], exclude=()),
    _row("gguf_iq3_s", "GGUF's IQ3_S: vectors of 4 weights from a book of 512, in blocks of 32" + UNTRIED,
         GGUF_TYPES["IQ3_S"], exclude=()),
    _row("gguf_q2_k", "GGUF's Q2_K: uint2 weights in blocks of 16 with a minimum, 16 under one scale" + UNTRIED,
         GGUF_TYPES["Q2_K"], exclude=()),
    _row("gguf_q3_k", "GGUF's Q3_K: int3 weights in blocks of 16, 16 of them under one scale" + UNTRIED,
         GGUF_TYPES["Q3_K"], exclude=()),
    _row("gguf_iq4_xs", "GGUF's IQ4_XS: weights of 16 values in blocks of 32, 8 of them under one scale",
         GGUF_TYPES["IQ4_XS"], exclude=()),
    _row("gguf_iq4_nl", "GGUF's IQ4_NL: weights of 16 values, closer near zero, in blocks of 32", GGUF_TYPES["IQ4_NL"],
         exclude=()),
    _row("gguf_q4_0", "GGUF's Q4_0: int4 weights in blocks of 32" + ON_SMALL, GGUF_TYPES["Q4_0"], exclude=()),
    _row("gguf_q4_1", "GGUF's Q4_1: uint4 weights in blocks of 32 with a minimum", GGUF_TYPES["Q4_1"], exclude=()),
    _row("gguf_q5_0", "GGUF's Q5_0: int5 weights in blocks of 32", GGUF_TYPES["Q5_0"], exclude=()),
    _row("gguf_q5_1", "GGUF's Q5_1: uint5 weights in blocks of 32 with a minimum", GGUF_TYPES["Q5_1"], exclude=()),
    _row("gguf_q8_0", "GGUF's Q8_0: int8 weights in blocks of 32", GGUF_TYPES["Q8_0"], exclude=()),
    _row("gguf_q4_k", "GGUF's Q4_K: uint4 weights in blocks of 32 with a minimum, 8 of them under one scale",
         GGUF_TYPES["Q4_K"], exclude=()),
    _row("gguf_q5_k", "GGUF's Q5_K: uint5 weights in blocks of 32 with a minimum, 8 of them under one scale",
         GGUF_TYPES["Q5_K"], exclude=()),
    _row("gguf_q6_k", "GGUF's Q6_K: int6 weights in blocks of 16, 16 of them under one scale",
         GGUF_TYPES["Q6_K"], exclude=()),
    _row("gguf_tq1_0", "GGUF's TQ1_0: ternary weights in blocks of 256, five in a byte: for models trained so",
         GGUF_TYPES["TQ1_0"], exclude=()),
    _row("gguf_tq2_0", "GGUF's TQ2_0: ternary weights in blocks of 256, four in a byte: for models trained so",
         GGUF_TYPES["TQ2_0"], exclude=()),
    _row("gguf_mxfp4", "GGUF's MXFP4: fp4 weights in blocks of 32 with a power of two" + ON_SMALL,
         GGUF_TYPES["MXFP4"], exclude=(), gguf=GgufTypes()),
    _row("gguf_nvfp4", "GGUF's NVFP4: fp4 weights in blocks of 16 with an e4m3 scale" + UNTRIED,
         GGUF_TYPES["NVFP4"], exclude=()),
)  # fmt: skip


def _mix(name: str, usual: str) -> Preset:
    """Return the preset of a named mix of llama.cpp, with this type of most tensors."""
    others = "all tensors" if usual in ("Q6_K", "Q8_0") else "most tensors, more bits in others"
    if name == "MXFP4_MOE":
        others = "all experts, Q8_0 in other tensors"
    end = UNTRIED if name in ("Q2_K", "Q3_K_S") or name.startswith(("IQ2", "IQ3")) else ""
    end = ": for models trained so" if name.startswith("TQ") else ": loses much" if name.startswith("IQ1") else end
    config = Config(global_quant_config=QuantizationConfig(weight=GGUF_TYPES[usual]), gguf=GgufTypes(mix=name))
    short = (usual,) if name in ("Q3_K_M", "Q4_K_M", "Q5_K_M") else ()  # what llama.cpp's tool means by it
    return Preset(name, f"llama.cpp's {name}: {usual} in {others}, embedding included{end}", config, short)


PRESETS: dict[str, Preset] = {preset.name: preset for preset in (*_TABLE, *starmap(_mix, MIXES.items()))}
