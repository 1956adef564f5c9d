"""Turns a config and a model's headers into a decision per layer: no weights, no torch, no side effect.

A job that cannot work is rejected here, before anything else happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.checkpoint.blocks import Blocks, find_blocks, is_of_tower, natural_order, warn_of_other_parts
from quantcore.checkpoint.experts import is_stack_of_experts, is_stack_of_shared_experts, routing_of
from quantcore.checkpoint.headers import ModelHeaders, main_dtype, scale_dtype
from quantcore.checkpoint.layers import is_head, is_matrix
from quantcore.checkpoint.layout import TensorHeader, TensorLayout, own_layout
from quantcore.checkpoint.model_config import ModelConfig
from quantcore.checkpoint.roles import tensors_of_drafts
from quantcore.config.algorithms import RotationConfig
from quantcore.config.job_spec import JobSpec
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import CalibrationConfig, Config, QuantizationMode
from quantcore.errors import ConfigError, ModelError
from quantcore.export import (
    EXPORTERS,
    Container,
    Fitting,
    default_format,
    holds_codes,
    layouts_of,
)
from quantcore.plan.cache_dtypes import check_cache_dtypes
from quantcore.plan.decisions import KeptTensor, decide, kept_layers, warn_of_layers_beside
from quantcore.plan.footprint import Footprint
from quantcore.plan.format_fit import fit_to_formats
from quantcore.plan.gguf_types import warn_of_growth, with_gguf_types

STREAMED_TYPES = ("Linear", "Conv1D")
FLOAT_DTYPES = ("F32", "F16", "BF16")
FILE_TO_FILE, STREAMED = "file_to_file", "streamed"


@dataclass(frozen=True)
class Plan:
    """The decisions for every layer, with sizes and memory.

    ``added`` are tensors of the result that the checkpoint does not have: the output projection of a model that shares
    it with the embedding, once a rotation separates the two. ``size_before_bytes`` is the size of the model as it is
    stored, ``float_bytes`` that of its weights as floats, which is larger if it is quantized already. ``layouts``
    holds, for each export, every tensor that will be written, in order: sizes are exact. ``executor``: FILE_TO_FILE
    processes weight after weight and runs nothing, STREAMED runs text through block after block. ``peak_memory_bytes``
    is an estimate for all processes together; ``memory_bytes`` has its parts. All sizes are bytes. ``experts``: how a
    mixture that is calibrated routes, with the tokens that an expert gets on average.
    """

    model_type: str
    blocks: Blocks
    layers: tuple[LayerPlan, ...]
    kept: tuple[KeptTensor, ...]
    exports: tuple[str, ...]
    calibration: CalibrationConfig
    needs_calibration: bool
    tied_lm_head: bool
    added: dict[str, TensorHeader]
    size_before_bytes: int
    float_bytes: int
    size_after_bytes: int
    layouts: dict[str, dict[str, TensorLayout]]
    executor: str
    footprint: Footprint
    experts: dict[str, int] | None = None
    warnings: tuple[str, ...] = ()

    def result_config(self, model_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the quantized model, as far as Transformers builds the model from it."""
        return {**model_config, "tie_word_embeddings": False} if self.added else dict(model_config)

    @property
    def kept_layers(self) -> list[str]:
        """The names of the linear layers that stay in high precision."""
        return kept_layers(self.kept)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def memory_by_phase(self) -> dict[str, dict[str, int]]:
        """The peak memory by part in the phases "quantize" (of a single process) and "verify"."""
        return {"quantize": self.memory_of_rank(), "verify": self.footprint.verifying(runs_model=self.runs_model)}

    @property
    def runs_model(self) -> bool:
        return self.executor != FILE_TO_FILE

    @property
    def allows_whole(self) -> bool:
        """True if the whole model may be in memory while the result is verified."""
        return self.footprint.allows_whole(runs_model=self.runs_model)

    @property
    def allows_check(self) -> bool:
        """True if another program may read the whole export while the result is verified."""
        return self.footprint.allows_check(runs_model=self.runs_model)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The peak memory by part in the phase that takes most."""
        return max(self.memory_by_phase.values(), key=lambda parts: sum(parts.values()))

    def memory_of_rank(self, num_ranks: int = 1, num_shards: int = 1) -> dict[str, int]:
        """Return the memory of each of several processes that quantize; ``num_shards``: see ``Footprint.streamed``."""
        if self.executor == FILE_TO_FILE:
            return self.footprint.file_to_file()
        return self.footprint.streamed(num_ranks=num_ranks, num_shards=num_shards)

    @property
    def peak_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    @property
    def main_export(self) -> str:
        """The export whose model is run and measured: the first one with codes, else the first."""
        return _main(self.exports)

    def layers_of(self, block: int | None) -> tuple[LayerPlan, ...]:
        """Return the planned layers of one decoder block, or those outside of blocks (None): the head."""
        return tuple(layer for layer in self.layers if layer.block == block and not layer.is_rounded_alone)

    @property
    def layers_rounded_alone(self) -> tuple[LayerPlan, ...]:
        """The planned layers of towers and draft heads, and embeddings, which calibration does not run."""
        return tuple(layer for layer in self.layers if layer.is_rounded_alone)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "num_blocks": self.num_blocks,
            "num_layers": len(self.layers),
            "layers": [layer.to_dict() for layer in self.layers],
            "kept": [{"name": tensor.name, "reason": tensor.reason} for tensor in self.kept],
            "exports": list(self.exports),
            "calibration": self.calibration.model_dump(mode="json", exclude_none=True),
            "needs_calibration": self.needs_calibration,
            **({} if self.experts is None else {"experts": self.experts}),
            "size_before_bytes": self.size_before_bytes,
            "size_after_bytes": self.size_after_bytes,
            "executor": self.executor,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_bytes": self.memory_bytes,
            "memory_by_phase": self.memory_by_phase,
            "warnings": list(self.warnings),
        }


def make_plan(spec: JobSpec, headers: ModelHeaders, *, num_schemes: int | None = None) -> Plan:
    """Decide how every layer is quantized, or why it is kept.

    Without ``spec.export`` the format is the one that most programs load for the scheme. The warnings of ``headers``
    are carried over into the plan. ``num_schemes``: the number of uniform models that a mix measures first; by default
    one for each of its schemes.

    Raises ConfigError or ModelError that names the layers and a remedy.
    """
    if num_schemes is None:
        num_schemes = len(spec.mix.schemes) if spec.mix else 0
    exports, tensors = spec.export or (default_format(spec.config),), headers.tensors
    config = with_gguf_types(spec.config, headers.config, tensors)
    spec = spec.model_copy(update={"config": config, "export": exports})
    _check_possible(config)
    if spec.shard_blocks:
        _check_shards(config, spec.file2file)
    blocks = find_blocks(tensors, headers.config)
    _check_architecture(config, tensors, blocks)
    _check_rotation(config, tensors, blocks)
    layers, kept, unmatched = decide(config, headers.config, tensors, blocks)
    outside = [layer.name for layer in layers if layer.is_rounded_alone]
    warnings = (*headers.warnings, *warn_of_other_parts(tensors, blocks, outside))
    warnings += (*unmatched, *warn_of_layers_beside(layers))
    if not layers:
        raise ConfigError(
            "Nothing is left to quantize: every linear layer is excluded or has no weight spec.",
            code="nothing_to_quantize",
            hint="Exclude fewer layers, or set a weight in global_quant_config.",
            field="/exclude",
        )
    check_cache_dtypes(spec.evaluation, headers, layers)
    layers, changes = fit_to_formats(config, layers, kept_layers(kept), exports)
    warnings += changes
    needs_calibration = _needs_calibration(config, layers)
    if spec.file2file:
        _check_data_free(config, layers)
    else:
        _check_calibration(spec.calibration, headers.config)
    added = _own_head(config, headers.config, tensors, blocks)
    layouts = {name: written_layout(name, layers, {**tensors, **added}, headers.config) for name in exports}
    sizes = {name: sum(layout.num_bytes for layout in each.values()) for name, each in layouts.items()}
    before = headers.total_bytes if headers.stored_bytes is None else headers.stored_bytes
    warnings += warn_of_growth(layers, tensors, sizes, before)
    footprint = Footprint.of(
        spec, headers, layers, blocks, needs_calibration=needs_calibration, num_schemes=num_schemes
    )
    return Plan(
        model_type=str(headers.config["model_type"]),
        blocks=blocks,
        layers=layers,
        kept=kept,
        exports=exports,
        calibration=spec.calibration,
        needs_calibration=needs_calibration,
        tied_lm_head=not any(map(is_head, tensors)),
        added=added,
        size_before_bytes=before,
        float_bytes=headers.total_bytes,
        size_after_bytes=sizes[_main(exports)],
        layouts=layouts,
        executor=FILE_TO_FILE if spec.file2file else STREAMED,
        footprint=footprint,
        experts=_expected_tokens(headers.config, spec.calibration) if needs_calibration else None,
        warnings=warnings,
    )


def _expected_tokens(model_config: Mapping[str, Any], calibration: CalibrationConfig) -> dict[str, int] | None:
    """Return the routing of a mixture, with the number of calibration tokens that an expert gets on average."""
    routing = routing_of(model_config)
    if routing is None or "num_per_token" not in routing:
        return routing
    num_tokens = calibration.num_samples * calibration.seq_len * routing["num_per_token"]
    return routing | {"tokens_per_expert": num_tokens // routing["num_experts"]}


def export_dir(folder: Path, plan: Plan, export: str) -> Path:
    """Return the folder of an export: the artifact folder itself for a single format, else a folder in it."""
    return folder if len(plan.exports) == 1 else folder / export


def written_layout(
    export: str, layers: Sequence[LayerPlan], tensors: Mapping[str, TensorHeader], model_config: Mapping[str, Any]
) -> dict[str, TensorLayout]:
    """Return the layout of every tensor that the format will hold, in the model's order."""
    ordered = sorted(tensors, key=natural_order)
    if not holds_codes(export):
        return own_layout({name: tensors[name] for name in ordered})
    exporter = EXPORTERS.get(export)
    planned, computed = {f"{layer.name}.weight": layer for layer in layers}, main_dtype(tensors)
    layout: dict[str, TensorLayout] = {}
    for name in ordered:
        if name in planned:
            parts = layouts_of(exporter, planned[name], scale_dtype(tensors[name].dtype, computed))
            if taken := (parts.keys() & tensors.keys()) - {name}:
                raise ModelError(
                    f"The model has a tensor '{min(taken)}', but {export} writes one of that name for '{name}'.",
                    code="tensor_name_taken",
                    hint="Remove that tensor if the model does not use it, or choose another format.",
                )
            layout.update(parts)
        elif not isinstance(exporter, Container):
            layout[name] = TensorLayout(tensors[name].dtype, tensors[name].shape)
        elif (entry := exporter.float_layout(name, tensors[name], model_config)) is not None:
            layout[name] = entry
    if isinstance(exporter, Fitting):
        exporter.check(model_config, layout)
    return layout


def _check_architecture(config: Config, tensors: Mapping[str, TensorHeader], blocks: Blocks) -> None:
    matrices = {
        name: each.shape for name, each in tensors.items() if name.startswith(blocks.prefixes) and is_matrix(each)
    }
    stacks = [
        name for name, shape in matrices.items()
        if is_stack_of_experts(name, shape) and not is_stack_of_shared_experts(name, shape)
    ]  # fmt: skip
    odd = [name for name in stacks if config.choose(name.removesuffix(".weight"), "Linear")[0] is not None]
    if odd:
        raise ModelError(
            f"The experts of this model are stored in an unsupported layout: '{odd[0]}' {list(tensors[odd[0]].shape)}.",
            code="unsupported_architecture",
            hint="Supported layouts: one matrix per expert, and stacks of [out, in] matrices called gate_up_proj "
            f"and down_proj. Exclude '*.{odd[0].removesuffix('.weight').rsplit('.', 2)[1]}.*' to keep these "
            "experts in high precision.",
        )
    odd = [name for name, tensor in tensors.items() if name.endswith("weight") and tensor.dtype not in FLOAT_DTYPES]
    if odd:
        raise ModelError(
            f"{len(odd)} weight(s) are not float16, bfloat16 or float32, first '{odd[0]}' ({tensors[odd[0]].dtype}).",
            code="unsupported_weights_dtype",
            hint="Use the float model.",
        )


def _check_possible(config: Config) -> None:
    """Raise ConfigError for settings that block-by-block quantization does not support."""
    types = [kind for kind in config.layer_type_quant_config if kind not in STREAMED_TYPES]
    faults = {
        "algo_config": (
            ", ".join(_online(config)),
            "Such a rotation happens at run time, which no export format can store: use r1 and r2. Only a model in "
            "memory (ModelQuantizer) can run r3 and r4.",
        ),
        "quant_mode": ("fx_graph_mode" * (config.quant_mode is QuantizationMode.fx_graph_mode), "Use eager_mode."),
        "softmax_quant_spec": (
            "softmax" * (config.softmax_quant_spec is not None),
            "Attention probabilities can be quantized only with the whole model in memory: use ModelQuantizer, and "
            "ModelExporter for the quark format (presets.with_attention).",
        ),
        "layer_type_quant_config": (", ".join(types), f"It can contain {' and '.join(STREAMED_TYPES)}."),
    }
    for field, (request, hint) in faults.items():
        if request:
            raise ConfigError(
                f"{field} asks for {request}, which is not available when a checkpoint is quantized block by block.",
                code="unsupported_config",
                hint=hint,
                field=f"/{field}",
            )


def _check_shards(config: Config, file2file: bool) -> None:
    """Raise ConfigError for shards if no block is run, or if an algorithm needs whole blocks."""
    algorithm = config.needs_whole_blocks
    if file2file or algorithm is not None:
        why = "file2file processes single weights" if file2file else f"{algorithm} needs whole blocks"
        raise ConfigError(
            f"shard_blocks divides every block among several processes, but {why}.",
            code="unsupported_config",
            hint=f"Remove {'file2file' if file2file else algorithm} or shard_blocks.",
            field="/shard_blocks",
        )


def _online(config: Config) -> list[str]:
    """Return the requested rotations that cannot be folded into weights."""
    rotations = [step for step in config.algo_config if isinstance(step, RotationConfig)]
    return [f"rotation {name}" for name in ("r3", "r4") if any(getattr(rotation, name) for rotation in rotations)]


def _check_rotation(config: Config, tensors: Mapping[str, TensorHeader], blocks: Blocks) -> None:
    """Raise ConfigError if the stream would be rotated, and other parts of the model read it or write to it.

    Draft heads read the hidden states of the blocks. Towers put what they see or hear in the place of embeddings.
    """
    if not config.rotates_stream:
        return
    if drafts := tensors_of_drafts(tensors, blocks):
        why = f"the draft head reads ('{drafts[0]}' and others): the model would accept none of its tokens"
    elif tower := next(filter(is_of_tower, tensors), None):
        why = (
            f"the towers of this model add to as well ('{tower}' and others), which are not rotated: answers about"
            " images or sound would be wrong"
        )
    else:
        return
    raise ConfigError(
        f"Rotating the stream (r1) changes the hidden states that {why}.",
        code="cannot_rotate",
        hint="Remove rotation, or use only r2.",
        field="/algo_config",
    )


def _own_head(
    config: Config, model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], blocks: Blocks
) -> dict[str, TensorHeader]:
    """Return the output projection that a rotated stream needs if the model shares the embedding's weight."""
    if not config.rotates_stream or any(map(is_head, tensors)):
        return {}
    rows = ModelConfig(model_config).vocab_size
    embeddings = [
        header
        for name, header in tensors.items()
        if len(header.shape) == 2 and header.shape[0] == rows and not name.startswith(blocks.prefixes)
    ]
    if not embeddings:
        raise ModelError(
            "Rotating the stream changes the embedding, but this model's embedding was not found.",
            code="cannot_rotate",
            hint="Remove rotation, or use only r2.",
        )
    return {"lm_head.weight": embeddings[0]}


def _check_calibration(calibration: CalibrationConfig, model_config: Mapping[str, Any]) -> None:
    longest = model_config.get("max_position_embeddings")
    if isinstance(longest, int) and calibration.seq_len > longest:
        raise ConfigError(
            f"calibration.seq_len is {calibration.seq_len}, but the model reads at most {longest} tokens.",
            code="seq_len_too_long",
            hint=f"Use {longest} or less.",
            field="/calibration/seq_len",
        )


def _main(exports: Sequence[str]) -> str:
    return next(filter(holds_codes, exports), exports[0])


def _check_data_free(config: Config, layers: Sequence[LayerPlan]) -> None:
    learning: list[str] = [step.name for step in config.algo_config if step.needs_calibration]
    learning += [f"{layer.name} ({layer.scheme})" for layer in layers if layer.config.needs_calibration][:1]
    if learning:
        raise ConfigError(
            f"{learning[0]} needs calibration data, which file-to-file mode does not use.",
            code="needs_calibration",
            hint="Remove file2file, or use a scheme with only weights or with dynamic inputs (w4a16, fp8_dynamic, "
            "mxfp4), without algorithms.",
            field="/file2file",
        )


def _needs_calibration(config: Config, layers: Sequence[LayerPlan]) -> bool:
    """Return True if algorithms or layers learn from calibration. Raises ConfigError for layers beside an imatrix."""
    learning = next((layer for layer in layers if layer.config.needs_calibration), None)
    if config.imatrix is not None and learning is not None:
        raise ConfigError(
            f"{learning.name} ({learning.scheme}) needs the ranges of its activations, which an importance matrix does"
            " not have.",
            code="needs_calibration",
            hint="Remove the imatrix, or use a scheme with only weights or with dynamic inputs.",
            field="/algo_config",
        )
    return learning is not None or any(algorithm.needs_calibration for algorithm in config.algo_config)
