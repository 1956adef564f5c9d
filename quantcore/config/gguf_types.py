"""The types of tensors in GGUF files, by llama.cpp's names, and the spec of each. No torch."""

from __future__ import annotations

from pydantic import ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from quantcore.config.spec import Dtype, QSchemeType, QuantizationSpec, ScaleType, ZeroPointType
from quantcore.config.values import STRICT, Value


def _spec(dtype: str, group_size: int = 32, scale_type: ScaleType = ScaleType.float16) -> QuantizationSpec:
    """Return the spec of blocks with these codes; unsigned ones count from a minimum, which is stored as well."""
    zeros = ZeroPointType.float32 if dtype.startswith("u") else ZeroPointType.int32
    return QuantizationSpec(
        dtype=Dtype(dtype),
        qscheme=QSchemeType.per_group,
        group_size=group_size,
        scale_type=scale_type,
        zero_point_type=zeros,
    )


GGUF_TYPES = {
    "IQ2_XXS": _spec("iq2_xxs", 32, ScaleType.odd4),
    "IQ2_XS": _spec("iq2_xs", 16, ScaleType.odd4),
    "IQ2_S": _spec("iq2_s", 16, ScaleType.odd4),
    "IQ3_XXS": _spec("iq3_xxs", 32, ScaleType.odd4),
    "IQ3_S": _spec("iq3_s", 32, ScaleType.odd4),
    "Q2_K": _spec("uint2", 16, ScaleType.uint4),
    "Q3_K": _spec("int3", 16, ScaleType.int6),
    "IQ4_XS": _spec("iq4_nl", 32, ScaleType.int6),
    "IQ4_NL": _spec("iq4_nl"),
    "Q4_0": _spec("int4"),
    "Q4_1": _spec("uint4"),
    "Q5_0": _spec("int5"),
    "Q5_1": _spec("uint5"),
    "Q8_0": _spec("int8"),
    "Q4_K": _spec("uint4", 32, ScaleType.uint6),
    "Q5_K": _spec("uint5", 32, ScaleType.uint6),
    "Q6_K": _spec("int6", 16, ScaleType.int8),
}
"""The spec of each type that can be written."""

SHORT_ROWS = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
"""Replacements of types with super-blocks where rows are not a multiple of 256, as in llama.cpp's own tool."""

MIXES = {
    "IQ2_XXS": "IQ2_XXS",
    "IQ2_XS": "IQ2_XS",
    "IQ2_S": "IQ2_XS",
    "IQ2_M": "IQ2_S",
    "IQ3_XXS": "IQ3_XXS",
    "IQ3_XS": "IQ3_S",
    "IQ3_S": "IQ3_S",
    "IQ3_M": "IQ3_S",
    "Q2_K": "Q2_K",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "IQ4_XS": "IQ4_XS",
    "IQ4_NL": "IQ4_NL",
    "Q4_0": "Q4_0",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
    "Q8_0": "Q8_0",
}
"""llama.cpp's named mixes of types, each with the type of most tensors. ``plan.gguf_mixes`` has the other ones."""

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names of the embedding and of the output projection in the checkpoints of all models that GGUF files can store."""


@dataclass(frozen=True, config=STRICT)
class GgufTypes(Value):
    """Types of tensors in a GGUF file by llama.cpp's names, in any case (``q6_k``).

    ``mix`` gives every tensor the type that llama.cpp's own tool would, as far as the config does not name the layer.
    ``token_embedding_type`` and ``output_type`` are those of the embedding and of the output projection. If a model
    uses one matrix for both, either names its type. Without any of them the embedding is not quantized, and the output
    projection is quantized like any other layer.
    """

    mix: str | None = None
    token_embedding_type: str | None = None
    output_type: str | None = None

    @field_validator("mix", "token_embedding_type", "output_type")
    @classmethod
    def _is_known(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is None:
            return None
        known = MIXES if info.field_name == "mix" else GGUF_TYPES
        if name.upper() not in known:
            raise ValueError(f"'{name}' cannot be written; {info.field_name} can be {', '.join(known)}")
        return name.upper()
