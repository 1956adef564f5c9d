"""Interface of exporters: check whether a layer fits the format, write its tensors, read them back, describe them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.checkpoint.roles import DRAFT_PART
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import (
    DEFAULT_SHARD_SIZE,
    Config,
    Dtype,
    QSchemeType,
    QuantizationSpec,
    ScaleType,
    ZeroPointType,
    parse_size,
)
from quantcore.export.readers import Readers
from quantcore.registry import Registry

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.qtensor import QLayer
    from quantcore.tensors.sink import TensorSink
    from quantcore.tensors.source import TensorSource

UNKNOWN = Readers()
MAX_FILE_BYTES = 48_000_000_000
"""The largest file of a container that can be split: the Hub takes files of up to 50 GB."""
Tensors = dict[str, "torch.Tensor"]

KV_SCALES = {"k_proj": "../k_scale", "v_proj": "../v_scale"}
"""Names of the KV cache's scales, beside the projection that computes keys or values, in formats that store them."""


class Exporter(Protocol):
    """An on-disk format. Exporters keep no state: they map values to tensors and back.

    ``encode`` and ``decode`` (see ``Decoder``) use the last part of a tensor's name (``weight_scale``), without the
    layer's name; ``../k_scale`` lies beside the layer (see ``tensor_name``).
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...

    def refuse(self, layer: LayerPlan) -> str | None:
        """Return why this format (or its consumer) cannot hold ``layer``, as the end of a sentence; None if it can."""

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        """Return the layout of the tensors that ``encode`` makes; ``model_dtype`` is safetensors' name (``BF16``)."""

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        """Return the tensors to store; ``model_dtype`` as in ``layout``."""

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any] | None:
        """Return the ``quantization_config`` of config.json.

        ``kept`` are the full names of linear layers left as they were. None if config.json has no
        ``quantization_config``, so that readers take the files for an ordinary model.
        """

    def load_hint(self, path: str) -> str:
        """Return Python lines that load the checkpoint at ``path`` in the format's main program."""


@runtime_checkable
class Decoder(Protocol):
    """An exporter whose files hold codes, and the calibrated parameters of activations.

    The files of every other exporter are an ordinary checkpoint: the tensors of the float model, in their dtypes, and
    nothing about activations.
    """

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        """Rebuild the argument of ``encode`` from only the stored tensors."""


@runtime_checkable
class Uniform(Protocol):
    """An exporter whose config.json has some settings only once, for all layers."""

    def same_everywhere(self, layer: LayerPlan) -> dict[str, object]:
        """Return the settings of ``layer`` that all layers must share: ``{"group_size": 64}``."""


@runtime_checkable
class OwnFiles(Protocol):
    """An exporter that describes the quantization in JSON files of its own, beside config.json."""

    def own_files(self, quantization_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the files by name, for the same ``quantization_config`` as in config.json."""


@runtime_checkable
class OwnConfig(Protocol):
    """An exporter whose program looks for other settings in config.json than ``quantization_config``."""

    def own_config(self, model_config: Mapping[str, Any], quantization_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that are added to ``model_config``, which is config.json without what is quantized."""


@runtime_checkable
class Fitting(Protocol):
    """An exporter for one program, which has a list of models and a form of its own for some settings."""

    def adapt(self, layers: tuple[LayerPlan, ...]) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
        """Return the layers with open settings of their configs decided as the format needs, and warnings."""

    def check(self, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]) -> None:
        """Raise ConfigError for a model that the format, or its program, cannot hold. It is of config.json."""


@runtime_checkable
class Stacking(Protocol):
    """An exporter for a program that loads the experts of some models only in stacks."""

    def stacked(
        self, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]
    ) -> tuple[dict[str, TensorLayout], dict[str, TensorHeader]]:
        """Return the tensors of the files, and those that are a part of one of them (see ``Sink``)."""


@runtime_checkable
class Container(Fitting, Protocol):
    """An exporter with a container other than safetensors (GGUF, ONNX).

    If ``holds_tokenizer``, the container is the whole model: config.json and the files of the tokenizer are not copied
    beside it. Tensors have the names of the checkpoint here; their names in the file, and the order of their rows, are
    up to the exporter. ``model_config`` is config.json.
    """

    @property
    def holds_tokenizer(self) -> bool: ...

    @property
    def can_be_split(self) -> bool:
        """Whether a program reads the container from several files."""

    @property
    def file_module(self) -> str:
        """The full name of the module with the functions of ``ContainerFile``. It may need torch; exporters do not."""

    def float_layout(self, name: str, tensor: TensorHeader, model_config: Mapping[str, Any]) -> TensorLayout | None:
        """Return the layout of a tensor that is not quantized; None if it is left out. Raises as ``check``."""


@dataclass(frozen=True)
class FileContents:
    """What the file of a container is written from.

    ``layouts`` has every tensor of the file, those of the planned ``layers`` included. ``model_config`` is config.json,
    ``model_dir`` has the tokenizer, and ``tensors`` are the float checkpoint's. ``mix``: the name of a mix of GGUF
    types that was asked for. ``max_bytes``: of the tensors of one file, if the format can have several.
    """

    layouts: Mapping[str, TensorLayout]
    layers: tuple[LayerPlan, ...]
    model_config: Mapping[str, Any]
    model_dir: Path
    tensors: Mapping[str, TensorHeader]
    mix: str | None = None
    max_bytes: int = MAX_FILE_BYTES


class ContainerFile(Protocol):
    """Writes and reads the file of a container."""

    def sink(self, folder: Path, contents: FileContents, *, creates: bool = True) -> TensorSink:
        """Return the sink for the tensors of the file.

        Unless it ``creates`` the file, one with the same arguments has done so, and what it wrote stays. Raises
        ModelError for a model or a tokenizer that does not fit.
        """

    def source(
        self,
        folder: Path,
        layouts: Mapping[str, TensorLayout],
        model_config: Mapping[str, Any],
        floats: Mapping[str, TensorHeader],
    ) -> TensorSource:
        """Return the source that reads the written files; ``floats`` are the checkpoint's tensors."""


def max_file_bytes(max_shard_size: str) -> int:
    """Return the bytes of tensors in one file of a container that can be split, for the ``max_shard_size`` of a job."""
    return MAX_FILE_BYTES if max_shard_size == DEFAULT_SHARD_SIZE else parse_size(max_shard_size)


def readers_of(export: str) -> Readers:
    """Return what is known of the programs that read a format: the exporter's ``readers``, if it has some."""
    readers: Readers = getattr(EXPORTERS.get(export), "readers", UNKNOWN)
    return readers


def file_of(exporter: Container) -> ContainerFile:
    """Return what writes and reads the container's file."""
    return cast(ContainerFile, import_module(exporter.file_module))


def tensor_name(layer: str, part: str) -> str:
    """Return the full name of a layer's tensor: ``self_attn.k_scale`` for ``self_attn.k_proj`` and ``../k_scale``."""
    return f"{layer.rpartition('.')[0]}.{part[3:]}" if part.startswith("../") else f"{layer}.{part}"


def layouts_of(exporter: Exporter, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
    """Return ``exporter.layout`` by the tensors' full names."""
    return {tensor_name(layer.name, part): entry for part, entry in exporter.layout(layer, model_dtype).items()}


def file_layouts(
    exporter: Exporter, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]
) -> tuple[dict[str, TensorLayout], dict[str, TensorHeader]]:
    """Return the layouts of the tensors in the files, and the headers of the planned ones that are parts of them."""
    return exporter.stacked(model_config, layouts) if isinstance(exporter, Stacking) else (dict(layouts), {})


def encoded(exporter: Exporter, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
    """Return ``exporter.encode`` by the tensors' full names."""
    parts = exporter.encode(layer, quantized, model_dtype)
    return {tensor_name(layer.name, part): tensor for part, tensor in parts.items()}


def refuse_everywhere(
    layer: LayerPlan, *, outliers: bool = False, real_zero_points: bool = False, embeddings: bool = False
) -> str | None:
    """Return why no format for language models can hold ``layer``; None if some may.

    Most formats cannot store inputs beyond a threshold unquantized (``outliers``), ``real_zero_points`` or codes of
    ``embeddings``.
    """
    weight, outputs, inputs = layer.weight, layer.config.output_tensors, layer.input_tensors
    if layer.kind != "Linear" and not (embeddings and layer.is_embedding):
        return f"programs that read it do not support a quantized {layer.kind}"
    if layer.config.bias is not None:
        return "it does not store quantized biases"
    if weight.ch_axis not in ((None, -1, 1) if weight.qscheme is QSchemeType.per_group else (None, 0)):
        return "scales belong to output channels, or to groups of inputs"
    if weight.zero_point_type is ZeroPointType.float32 and not real_zero_points:
        return "zero points are stored as whole numbers"
    if not outliers and inputs is not None and inputs.outlier_threshold is not None:
        return "it cannot store outlier_threshold; use bitsandbytes"
    if outputs is not None and (not outputs.is_static or outputs.qscheme is not QSchemeType.per_tensor):
        return "quantized outputs need one static scale per tensor"
    return None


def refuse_activations(layer: LayerPlan) -> str | None:
    """Return why a weight-only format cannot hold ``layer``; None if its activations are not quantized."""
    if layer.input_tensors is not None or layer.config.output_tensors is not None:
        return "it stores only weights, but this layer has quantized activations"
    return None


def is_plain(spec: QuantizationSpec) -> bool:
    """Return whether ``spec`` has one stage and scales that are ordinary numbers."""
    kind = spec.scale_type
    return spec.over is None and not (kind.in_one_byte or kind.in_two_levels)


def is_static_fp8(spec: QuantizationSpec | None) -> bool:
    """Return whether ``spec`` is fp8_e4m3 with one scale for the tensor, fixed by calibration or by the weight."""
    return (
        spec is not None
        and spec.dtype is Dtype.fp8_e4m3
        and spec.qscheme is QSchemeType.per_tensor
        and spec.is_static
        and is_plain(spec)
    )


def refuse_inputs(weight: QuantizationSpec, inputs: QuantizationSpec | None) -> str | None:
    """Return why 8-bit kernels cannot take these inputs with such a weight; None if they can."""
    if inputs is None:
        return None
    if inputs.dtype != weight.dtype:
        return "weight and input must have the same dtype"
    if not is_plain(inputs) or inputs.qscheme is QSchemeType.per_group:
        return "inputs have one scale per tensor or per token"
    if inputs.is_static and inputs.qscheme is not QSchemeType.per_tensor:
        return "static inputs have one scale per tensor"
    return None


def refuse_blocks(layer: LayerPlan) -> str | None:
    """Return why kernels cannot take a per_block weight, or such inputs with it; None if they can.

    The last block may have fewer rows than the others, but not fewer columns.
    """
    weight, inputs, block = layer.weight, layer.input_tensors, layer.weight.block_size
    assert block is not None
    if weight.dtype is not Dtype.fp8_e4m3 or not is_plain(weight):
        return "per_block weights are fp8_e4m3 with plain scales"
    if layer.in_features % block[1]:
        return f"blocks of {block[1]} inputs must fill the row, but {layer.in_features} is not a multiple"
    if inputs is None:
        return None
    is_grouped = inputs.dtype is weight.dtype and is_plain(inputs) and inputs.qscheme is QSchemeType.per_group
    if not (is_grouped and inputs.is_dynamic and block == (inputs.group_size, inputs.group_size)):
        return "inputs of per_block weights are dynamic fp8_e4m3, in groups of the width of a square block"
    return None


def _check(name: str, entry: Any) -> None:
    """Raise ValueError unless ``entry`` is an exporter with that name."""
    missing = [part for part in _PARTS if not hasattr(entry, part)]
    if missing or isinstance(entry, type):
        raise ValueError(f"it is not an exporter, an object with {', '.join(missing or _PARTS)}")
    if entry.name != name:
        raise ValueError(f"the name of the exporter is '{entry.name}'")


_PARTS = ("name", "title", "refuse", "layout", "encode", "quantization_config", "load_hint")
EXPORTERS: Registry[Exporter] = Registry("export_format", "quantcore.export", "bitfoundry.exporters", check=_check)

_SCALE_DTYPES = {ScaleType.float32: "F32", ScaleType.float16: "F16", ScaleType.bfloat16: "BF16"}


def stored_scale_dtype(spec: QuantizationSpec, model_dtype: str) -> str:
    """Return the safetensors dtype of the scales of ``spec`` in a model of ``model_dtype``."""
    return _SCALE_DTYPES.get(spec.scale_type, model_dtype)


def holds_codes(export: str) -> bool:
    """Return True if the format's exporter is a Decoder."""
    return isinstance(EXPORTERS.get(export), Decoder)


_NUMBERED = re.compile(r"(.*?)(\w+)\.(\d+)\.")


def draft_patterns(layers: Iterable[LayerPlan], kept: Iterable[str]) -> list[str]:
    """Return regular expressions for the layers of draft heads that are ``kept`` whole: ``.*\\blayers\\.61\\..*``.

    Draft heads are the blocks behind those with ``layers``, and modules called mtp or eagle. Consumers build them with
    modules of other names inside (``layers.61.mtp_block.self_attn``), which no name of the checkpoint matches.
    """
    return [draft_pattern(part) for part in kept_drafts(layers, kept)]


def kept_drafts(layers: Iterable[LayerPlan], kept: Iterable[str]) -> list[str]:
    """Return the draft heads that are ``kept`` whole, as ``layers.61`` or ``mtp``."""
    layers = tuple(layers)
    quantized, last = draft_parts(layers), _last_blocks(layers)
    parts = dict.fromkeys(part for name in kept if (part := _draft_part(name, last)) is not None)
    return [part for part in parts if part not in quantized]


def draft_parts(layers: Iterable[LayerPlan]) -> dict[str, LayerPlan]:
    """Return the draft heads that are quantized, as ``layers.61`` or ``mtp``, each with one of its layers."""
    layers = tuple(layers)
    last = _last_blocks(layers)
    drafts = ((_draft_part(layer.name, last), layer) for layer in layers if layer.is_in_draft)
    return {part: layer for part, layer in drafts if part is not None}


def draft_pattern(part: str) -> str:
    """Return the regular expression of all layers of the draft head ``part``."""
    return rf".*\b{re.escape(part)}\..*"


def _last_blocks(layers: Iterable[LayerPlan]) -> dict[tuple[str, str], int]:
    """Return the number of the last block of each list that has ``layers`` of the language model or a tower."""
    last: dict[tuple[str, str], int] = {}
    for layer in layers:
        if not layer.is_in_draft and (match := _NUMBERED.match(layer.name)):
            last[match[1], match[2]] = max(int(match[3]), last.get((match[1], match[2]), 0))
    return last


def _draft_part(name: str, last: Mapping[tuple[str, str], int]) -> str | None:
    match, draft = _NUMBERED.match(name), DRAFT_PART.search(name)
    if draft is not None:
        return draft[1]
    if match is not None and int(match[3]) > last.get((match[1], match[2]), int(match[3])):
        return f"{match[2]}.{match[3]}"
    return None
