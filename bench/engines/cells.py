"""The cells of the comparison: schemes and algorithms, those that each engine lacks, and their estimated costs.

A cell is ``scheme:algorithm``. ``MISSING`` has a row with the reason for each cell that an engine lacks, so that the
table of results can explain its gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

SCHEMES = {
    "uint4": "uint4 weights, asymmetric, groups of 64",
    "int4": "int4 weights, symmetric, groups of 64",
    "uint3": "3-bit weights, asymmetric, groups of 64",
    "uint2": "2-bit weights, asymmetric, groups of 64",
    "int8": "int8 weights per channel, int8 inputs with one calibrated scale a tensor",
    "int8_dynamic": "int8 weights per channel, int8 inputs with one scale a token, found at run time",
    "fp8": "fp8 (e4m3) weights and inputs, one scale a tensor, calibrated",
    "fp8_kv": "fp8 as above, and an fp8 KV cache with calibrated scales",
    "mxfp4": "MXFP4 weights and inputs",
}
ALGORITHMS = {
    "rtn": "rounding, ranges by minimum and maximum",
    "range_search": "rounding, ranges searched by the error weighted with the inputs' power",
    "smoothquant": "SmoothQuant, then rounding",
    "awq": "AWQ, then rounding",
    "gptq": "GPTQ",
    "smoothquant+gptq": "SmoothQuant, then GPTQ",
    "rotation+gptq": "rotation, then GPTQ",
    "awq+gptq": "AWQ, then GPTQ",
    "gptaq": "GPTAQ: GPTQ that also corrects what the layers before changed",
    "rotation+gptaq": "rotation, then GPTAQ",
    "yaqa": "YAQA: GPTAQ that rounds for the predictions, with gradients",
    "gptaq+distill": "GPTAQ, then the scales tuned for the predictions on more windows of the text",
    "yaqa+distill": "YAQA, then the scales tuned for the predictions on more windows of the text",
    "autoround": "AutoRound: codes and scales tuned by signed gradients, 200 steps of 8 windows a block",
}
FLOAT = "float"  # the row that the others are compared with: no engine at all
ENGINES = {
    FLOAT: "Transformers, bfloat16",
    "ours": "quantcore",
    "quark": "AMD Quark",
    "llmcompressor": "llm-compressor",
    "gptqmodel": "GPTQModel",
    "autoround": "AutoRound",
}
AUTOROUND_HAS = ("rtn", "range_search", "autoround")
# The cells of `make bench-engines`; --cells '*' runs the others, too.
USUAL = (
    *(f"{scheme}:{algorithm}" for scheme in ("uint4", "int4") for algorithm in ("rtn", "awq", "gptq", "rotation+gptq")),
    *(f"{scheme}:{algorithm}" for scheme in ("int8", "fp8") for algorithm in ("rtn", "smoothquant", "gptq",
                                                                             "rotation+gptq")),
    "mxfp4:rtn", "mxfp4:smoothquant", "mxfp4:awq", "mxfp4:gptq", "mxfp4:rotation+gptq",
    "fp8_kv:rtn", "int8:smoothquant+gptq", "int8_dynamic:smoothquant+gptq",
    "uint4:range_search", "uint4:awq+gptq", "uint4:gptaq", "uint4:rotation+gptaq",
    "uint4:yaqa", "int4:yaqa",
    *(f"{scheme}:{algorithm}" for scheme in ("uint3", "uint2")
      for algorithm in ("gptq", "gptaq", "yaqa", "yaqa+distill")),
)  # fmt: skip
# engine, scheme, algorithm, reason: the first row that matches a cell explains why it does not exist.
MISSING = (
    ("*", "*int[234]", "smoothquant*", "the inputs stay as they are: there is nothing to smooth"),
    ("*", "*8*", "awq*", "AWQ is for weights of few bits"),
    ("*", "*8*", "range_search", "at 8 bits ranges decide little"),
    ("*", "*8*", "autoround", "AutoRound is for weights of few bits"),
    ("*", "mxfp4", "autoround", "it is compared for weights alone"),
    ("gptqmodel", "int8*", "*", "it quantizes no inputs to int8"),
    ("gptqmodel", "fp8*", "*", "its fp8 leaves the inputs as they are"),
    ("gptqmodel", "mxfp4", "*", "it has no MXFP4"),
    ("gptqmodel", "*", "rotation*", "its rotation runs on CUDA alone (7.7.0)"),
    ("gptqmodel", "*", "range_search", "its range search does not look at the inputs"),
    ("gptqmodel", "*", "awq+gptq", "it takes one of the two"),
    ("llmcompressor", "*", "*gptaq", "it has no GPTAQ"),
    ("quark", "*", "yaqa", "it has no YAQA"),
    ("llmcompressor", "*", "yaqa", "it has no YAQA"),
    ("gptqmodel", "*", "yaqa", "it has no YAQA"),
    ("quark", "*", "*distill", "it tunes no scales for the predictions alone"),
    ("llmcompressor", "*", "*distill", "it tunes no scales for the predictions alone"),
    ("gptqmodel", "*", "*distill", "it tunes no scales for the predictions alone"),
    ("ours", "*8*", "*distill", "only scales of weights alone can be tuned"),
    ("ours", "mxfp4", "*distill", "only scales of weights alone can be tuned"),
    ("quark", "*", "autoround", "its AutoRound is experimental: quantize_model does not know it (0.13)"),
    ("llmcompressor", "*", "autoround", "it calls the package AutoRound, which has a row of its own"),
    ("gptqmodel", "*", "autoround", "it has no AutoRound"),
    ("autoround", "*8*", "*", "only its rounding of weights alone is compared"),
    ("autoround", "mxfp4", "*", "only its rounding of weights alone is compared"),
    *(
        ("autoround", "*", algorithm, "only its own algorithm is compared")
        for algorithm in ALGORITHMS
        if algorithm not in AUTOROUND_HAS
    ),
    ("quark", "int8_dynamic", "*", "it has no such scheme"),
    ("quark", "uint[23]", "*", "it has no such scheme"),
    ("quark", "*", "range_search", "its range searches have one scale a tensor"),
)
# CPU seconds of one thread for SmolLM2-135M and 32 x 512 tokens: measured in earlier runs or (AWQ, rotation) estimated
# from runs with fewer tokens. Only --list and the time limits use them.
ESTIMATES_S = {
    ("quark", "awq"): 2000, ("quark", "awq+gptq"): 2400, ("quark", "smoothquant"): 100, ("quark", "*gptq"): 360,
    ("quark", "*gptaq"): 700, ("quark", "*"): 50,
    ("llmcompressor", "awq"): 850, ("llmcompressor", "awq+gptq"): 1050, ("llmcompressor", "*gptq"): 170,
    ("llmcompressor", "*"): 70,
    ("gptqmodel", "awq"): 2600, ("gptqmodel", "gptq"): 190, ("gptqmodel", "gptaq"): 400, ("gptqmodel", "*"): 10,
    ("ours", "awq"): 120, ("ours", "*gptq"): 120, ("ours", "*gptaq"): 220, ("ours", "yaqa"): 700,
    ("ours", "*distill"): 1200, ("ours", "autoround"): 10000, ("autoround", "autoround"): 10000, ("autoround", "*"): 30,
    ("ours", "*"): 70, (FLOAT, "*"): 0,
}  # fmt: skip
AROUND_S = 90  # starting, loading, and the perplexity of 40 x 512 tokens


@dataclass(frozen=True)
class Cell:
    """An engine with a scheme and an algorithm."""

    engine: str
    scheme: str
    algorithm: str

    @property
    def name(self) -> str:
        return f"{self.scheme}:{self.algorithm}"

    @property
    def missing(self) -> str | None:
        """The reason why the engine lacks this cell; None if it has it."""
        for engine, scheme, algorithm, reason in MISSING:
            if all(map(fnmatchcase, (self.engine, self.scheme, self.algorithm), (engine, scheme, algorithm))):
                return reason
        return None

    @property
    def estimate_s(self) -> int:
        """The estimated CPU seconds of the whole process."""
        fits = (
            seconds
            for (engine, algorithm), seconds in ESTIMATES_S.items()
            if engine == self.engine and fnmatchcase(self.algorithm, algorithm)
        )
        return AROUND_S + next(fits)


def all_cells(engines: Sequence[str] = tuple(ENGINES)) -> Iterator[Cell]:
    """Yield the float model, then every scheme with every algorithm on every engine, missing cells included."""
    if FLOAT in engines:
        yield Cell(FLOAT, FLOAT, "none")
    for scheme in SCHEMES:
        for algorithm in ALGORITHMS:
            yield from (Cell(engine, scheme, algorithm) for engine in engines if engine != FLOAT)


def chosen(patterns: Sequence[str], engines: Sequence[str]) -> list[Cell]:
    """Return the existing cells of ``engines`` that match a pattern; the float model always comes first.

    Raises ValueError for a pattern that matches nothing.
    """
    cells = list(all_cells(tuple(dict.fromkeys((FLOAT, *engines)))))
    for pattern in patterns:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            raise ValueError(f"'{pattern}' fits no cell; a cell is like 'uint4:gptq'")
    wanted = [cell for cell in cells if any(fnmatchcase(cell.name, pattern) for pattern in patterns)]
    return [cells[0], *(cell for cell in wanted if cell.missing is None and cell.engine != FLOAT)]
