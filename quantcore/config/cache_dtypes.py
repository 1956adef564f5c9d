"""The dtypes in which programs can keep the KV cache of any model, beside 16 bits. No torch.

Sources: llama.cpp, ``kv_cache_types`` in ``common/arg.cpp``; vLLM 0.32, ``CacheDType`` in ``config/cache.py``.
vLLM's NVFP4 caches are missing, since they need scales from calibration, and so is ``ultraquant_4bit``, which kernels
for one GPU define.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantcore.errors import ConfigError, unknown_value


@dataclass(frozen=True)
class CacheDtype:
    """A dtype of a KV cache, by the ``name`` that the option of its ``program`` takes.

    A number takes ``bits`` (``value_bits`` if values differ from keys), and each head of a token ``bits_per_head``
    more, for scales of its own. The channels of a head must divide into ``block_size``. The program keeps 16 bits in
    ``num_spared`` blocks at each end of a model whose blocks all have attention.
    """

    name: str
    program: str
    bits: float
    value_bits: float | None = None
    bits_per_head: int = 0
    block_size: int = 1
    num_spared: int = 0

    def bits_of_head(self, size: int, *, are_keys: bool) -> float:
        """Return the bits that the keys or the values of a head of ``size`` channels take for a token."""
        bits = self.bits if are_keys or self.value_bits is None else self.value_bits
        return size * bits + self.bits_per_head

    def fits(self, size: int) -> bool:
        """Return True if the program can keep heads of ``size`` channels so."""
        turns_keys = self.value_bits is not None and self.bits < 8  # TurboQuant's Hadamard matrices
        return size % self.block_size == 0 and not (turns_keys and size & (size - 1))

    @property
    def option(self) -> str:
        """The options of ``program`` that choose it."""
        if self.program == "llama.cpp":
            return f"--cache-type-k {self.name} --cache-type-v {self.name}"
        return f"--kv-cache-dtype {self.name}"


_ALL = (
    *(
        CacheDtype(name, "llama.cpp", bits, block_size=32)
        for name, bits in (("q8_0", 8.5), ("q5_1", 6), ("q5_0", 5.5), ("q4_1", 5), ("q4_0", 4.5), ("iq4_nl", 4.5))
    ),
    CacheDtype("fp8", "vLLM", 8),
    CacheDtype("fp8_e5m2", "vLLM", 8),
    CacheDtype("fp8_per_token_head", "vLLM", 8, bits_per_head=32),
    CacheDtype("int8_per_token_head", "vLLM", 8, bits_per_head=32),
    CacheDtype("int4_per_token_head", "vLLM", 4, bits_per_head=32, block_size=2),
    CacheDtype("turboquant_k8v4", "vLLM", 8, 4, bits_per_head=16, num_spared=2),
    CacheDtype("turboquant_4bit_nc", "vLLM", 4, 4, bits_per_head=24, num_spared=2),
    CacheDtype("turboquant_k3v4_nc", "vLLM", 3, 4, bits_per_head=24, num_spared=2),
    CacheDtype("turboquant_3bit_nc", "vLLM", 3, 3, bits_per_head=24, num_spared=2),
)
CACHE_DTYPES = {dtype.name: dtype for dtype in _ALL}
PROGRAMS = {"llama_cpp": "llama.cpp", "vllm": "vLLM"}
"""Names that stand for all dtypes of a program."""

FIELD = "/evaluation/kv_cache_dtypes"
LATENT = "it has multi-head latent attention: runtimes cache the latent vector, Transformers what is computed of it"


def cache_dtypes(names: Sequence[str]) -> tuple[CacheDtype, ...]:
    """Return the dtypes of ``names``, each once, in this order. Raises ConfigError ``unknown_cache_dtype``."""
    found: dict[str, CacheDtype] = {}
    for name in names:
        chosen = [each for each in _ALL if each.name == name or each.program == PROGRAMS.get(name)]
        if not chosen:
            allowed = (*CACHE_DTYPES, *PROGRAMS)
            raise unknown_value("dtype of the KV cache", name, allowed, code="unknown_cache_dtype", field=FIELD)
        found |= {each.name: each for each in chosen}
    return tuple(found.values())


def not_measured(why: str) -> ConfigError:
    """Return the error for a model of which dtypes of the KV cache cannot be compared."""
    return ConfigError(
        f"Dtypes of the KV cache cannot be compared for this model: {why}.",
        code="cache_dtypes_not_measured",
        hint="Leave out --kv_cache_dtypes.",
        field=FIELD,
    )
