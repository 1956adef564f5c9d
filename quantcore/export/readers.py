"""What is known of the programs that read a format: each exporter says it of its own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantcore.config.layer_plan import LayerPlan


@dataclass(frozen=True)
class Readers:
    """The programs that read a format, seen with vLLM 0.32 and Transformers 5.23.

    The defaults hold for the format of an installed package that says nothing: no program is known to read it, and it
    comes last among the formats to choose from.
    """

    main: str = ""
    """The program of the exporter's ``load_hint``, as ``consumers.json`` calls it."""
    main_reads_all: bool = False
    """Whether the files are an ordinary model or graph, so that the main program reads them whatever is quantized."""
    preference: int = 100
    """Place in the order of formats that can hold a scheme: the default is the lowest, which most programs load."""
    in_vllm: bool = False
    """Whether vLLM reads the format."""
    vllm_reads_head: bool = False
    """Whether vLLM reads a quantized lm_head in it."""
    in_transformers: bool = False
    """Whether Transformers reads the format on a CPU, so that the proof can have it read the files."""
    for_transformers: bool = True
    """Whether Transformers is one of its programs: it reads GGUF, but few of the architectures."""
    transformers_package: str | None = None
    """The package that Transformers needs to read it, as pip names it."""
    stores_each_expert: bool = False
    """Whether experts are stored one by one, which Transformers does not read for models that only have stacks."""
    types_every_tensor: bool = False
    """Whether a file states the type of every tensor: a program that reads each scheme reads any mix of them."""

    def prefers(self, layers: Sequence[LayerPlan]) -> bool:
        """Return whether the format is the first choice for such layers, before all with a lower ``preference``."""
        return False

    def not_in_transformers(self, layers: Sequence[LayerPlan]) -> str | None:
        """Return why Transformers does not read such layers, as a sentence; None if no reason is known."""
        return None

    def only_on_gpus(self, layers: Sequence[LayerPlan]) -> str | None:
        """Return why Transformers does not read such layers without a GPU, as a sentence; None if it does."""
        return None

    def named_apart_in_vllm(self, layers: Sequence[LayerPlan]) -> str | None:
        """Return why vLLM does not find the settings of fused layers, as a sentence; None if it does."""
        return None

    def transformers_dtype(self, layers: Sequence[LayerPlan]) -> Literal["float32", "bfloat16"]:
        """Return the dtype to which Transformers decodes such layers, whatever the dtype of the model is."""
        return "float32"

    def needs_bfloat16(self, layers: Sequence[LayerPlan]) -> bool:
        """Return whether a model in another dtype than bfloat16 does not run in Transformers."""
        return False

    def rounds_inputs(self, layers: Sequence[LayerPlan]) -> bool:
        """Return whether Transformers always rounds the inputs of such layers, also in the proof."""
        return False
