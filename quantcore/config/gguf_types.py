"""The types of tensors in GGUF files, by llama.cpp's names, and the spec of each. No torch."""

from __future__ import annotations

from dataclasses import replace

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
    "IQ1_S": _spec("iq1_s", 32, ScaleType.odd3),
    "IQ1_M": _spec("iq1_m", 16, ScaleType.odd3),
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
    "TQ1_0": replace(_spec("tq1_0", 256), observer_cls="PerGroupMSEObserver"),
    "TQ2_0": replace(_spec("tq2_0", 256), observer_cls="PerGroupMSEObserver"),
    "MXFP4": _spec("fp4", 32, ScaleType.e8m0),
    "NVFP4": _spec("fp4", 16, ScaleType.ue4m3),
}
"""The spec of each type that can be written. Of three values the largest does not say where the range should end."""

SHORT_ROWS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "NVFP4": "IQ4_NL",
}  # fmt: skip
"""Replacements where rows are not a multiple of a type's block, as in llama.cpp's own tool.

That has none for NVFP4: IQ4_NL is as large.
"""

MIXES = {
    "IQ1_S": "IQ1_S",
    "IQ1_M": "IQ1_M",
    "IQ2_XXS": "IQ2_XXS",
    "IQ2_XS": "IQ2_XS",
    "IQ2_S": "IQ2_XS",
    "IQ2_M": "IQ2_S",
    "IQ3_XXS": "IQ3_XXS",
    "IQ3_XS": "IQ3_S",
    "IQ3_S": "IQ3_S",
    "IQ3_M": "IQ3_S",
    "TQ1_0": "TQ1_0",
    "TQ2_0": "TQ2_0",
    "Q2_K": "Q2_K",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "IQ4_XS": "IQ4_XS",
    "IQ4_NL": "IQ4_NL",
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_0": "Q5_0",
    "Q5_1": "Q5_1",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
    "Q8_0": "Q8_0",
    "MXFP4_MOE": "MXFP4",
}
"""llama.cpp's named mixes of types, each with the type of most tensors. ``plan.gguf_mixes`` has the other ones."""

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names of the embedding and of the output projection in the checkpoints of all models that GGUF files can store."""


@dataclass(frozen=True, config=STRICT)
class GgufTypes(Value):
    """Types of tensors in a GGUF file by llama.cpp's names, in any case (``q6_k``).

    ``mix`` gives every tensor the type that llama.cpp's own tool would, as far as the config does not name the layer.
    ``token_embedding_type`` and ``output_type`` are those of the embedding and of the output projection. If a model
    uses one matrix for both, either names its type. Without any of them the embedding is not quantized, the output
    projection is quantized like any other layer, and the result is a GGUF file unless a format is named.
    """

    mix: str | None = None
    token_embedding_type: str | None = None
    output_type: str | None = None

    @property
    def names_tensors(self) -> bool:
        """True if tensors get types by their role in a model."""
        return any((self.mix, self.token_embedding_type, self.output_type))

    @field_validator("mix", "token_embedding_type", "output_type")
    @classmethod
    def _is_known(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is None:
            return None
        known = MIXES if info.field_name == "mix" else GGUF_TYPES
        if name.upper() not in known:
            raise ValueError(f"'{name}' cannot be written; {info.field_name} can be {', '.join(known)}")
        return name.upper()
