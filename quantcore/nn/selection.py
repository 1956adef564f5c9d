"""Selects the layers of a model in memory to quantize and their configs, and records why others are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from quantcore.checkpoint.roles import find_roles
from quantcore.config.kv_cache import check_kv_cache
from quantcore.config.layer_plan import LayerPlan, check_groups, check_super_blocks
from quantcore.config.quantization import Config, QSchemeType
from quantcore.engine.model.cache_taps import cached_names
from quantcore.engine.modules.layers import kind_of, num_groups
from quantcore.errors import ConfigError, ModelError
from quantcore.formats.weight_layout import canonical
from quantcore.tensors.qtensor import check_finite

INDEXED = ("Embedding", "EmbeddingBag")
CONVOLUTIONS = ("Conv1d", "Conv2d", "ConvTranspose2d")


@dataclass(frozen=True)
class Selection:
    """The selected layers. ``modules``: those to quantize. ``kept``: other candidates, with the reason."""

    modules: dict[LayerPlan, nn.Module]
    kept: dict[str, str]
    warnings: tuple[str, ...]


def select_layers(model: nn.Module, config: Config) -> Selection:
    """Choose every layer's config by its name and class.

    A weight that several modules share is quantized only if all of them have the same weight spec; then it stays
    shared. Otherwise it is not quantized, so that no module changes another one's weight. Raises ConfigError,
    ModelError or NumericsError that names the layer.
    """
    config.refuse_regular_expressions()
    layers = {name: module for name, module in model.named_modules() if kind_of(module) is not None}
    chosen: dict[str, LayerPlan] = {}
    kept: dict[str, str] = {}
    roles = find_roles({name: parameter.shape for name, parameter in model.named_parameters()})
    cached = set(cached_names(model))
    for name, module in layers.items():
        kind = str(kind_of(module))
        layer_config, why = config.choose(name, kind, in_cache=name in cached)
        if name in roles and not config.names(name):
            kept[name] = roles[name]
        elif layer_config is None:
            kept[name] = why
        elif layer_config.weight is None and layer_config.output_tensors is None:
            kept[name] = f"{why} has no weight spec"
        else:
            shape = canonical(module.get_parameter("weight"), kind, num_groups(module)).shape
            is_certain = isinstance(model, PreTrainedModel) or config.cache_config(name) is not None
            in_cache = is_certain and name in cached
            chosen[name] = LayerPlan(name, None, tuple(shape), layer_config, kind, why, in_cache)
    model_config = model.config.to_dict() if isinstance(model, PreTrainedModel) else {}
    check_kv_cache(config, list(chosen.values()), layers, model_config)
    shared = dict(_shared_otherwise(model, chosen))
    for name in shared:
        del chosen[name]
    kept |= {name: f"shares its weight with {partner}" for name, partner in shared.items()}
    modules = {plan: layers[name] for name, plan in chosen.items()}
    if not modules:
        raise ConfigError(
            "Nothing is left to quantize: every layer is excluded or has no weight spec.",
            code="nothing_to_quantize",
            hint="Exclude fewer layers, or set a weight in global_quant_config. Layers: "
            f"{', '.join(list(layers)[:8]) or 'none'}{' ...' if len(layers) > 8 else ''}.",
            field="/exclude",
        )
    for plan, module in modules.items():
        _check_layer(plan, module)
    weighted = [plan for plan in modules if plan.config.weight is not None]
    check_groups(weighted)
    check_super_blocks(weighted)
    return Selection(modules, kept, tuple(_warnings(config, layers, shared)))


def _shared_otherwise(model: nn.Module, chosen: dict[str, LayerPlan]) -> Iterator[tuple[str, str]]:
    """Yield (name, partner) for chosen layers that share a weight with a partner that is quantized differently."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        plans = [chosen.get(name) for name in names]
        uses = {None if plan is None else (plan.config.weight, plan.shape) for plan in plans}
        if len(names) > 1 and len(uses) > 1:
            for name in names:
                if name in chosen and chosen[name].config.weight is not None:
                    yield name, next(other for other in names if other != name)


def _warnings(config: Config, layers: dict[str, nn.Module], shared: dict[str, str]) -> Iterator[str]:
    yield from config.warn_of_unmatched({name: str(kind_of(module)) for name, module in layers.items()})
    for name, partner in shared.items():
        yield (
            f"{name} shares its weight with {partner}, which is quantized differently: it stays unquantized. Use "
            f"the same weight spec for both, or untie them: {name}.weight = nn.Parameter({name}.weight.clone())."
        )


def _check_layer(plan: LayerPlan, module: nn.Module) -> None:
    weight = module.get_parameter("weight")
    if weight.is_meta:
        raise ModelError(
            f"The weight of {plan.name} is not in memory.",
            code="weight_not_in_memory",
            hint="A model offloaded with device_map cannot be quantized in memory: use the pipeline (quantcore run).",
        )
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ModelError(
            f"The weight of {plan.name} is {weight.dtype}.",
            code="unsupported_weights_dtype",
            hint="Use the float model (float16, bfloat16 or float32).",
        )
    check_finite(weight, plan.name)
    if plan.config.weight is not None and plan.config.weight.qscheme is QSchemeType.per_block and weight.ndim != 2:
        raise ConfigError(
            f"{plan.name} is a {plan.kind} whose weight has {weight.ndim} dimensions; per_block is only for matrices.",
            code="invalid_config",
            hint=f"Use per_channel or per_group for it ({plan.chosen_by}), or exclude it.",
            field="/weight/qscheme",
        )
    if plan.kind in INDEXED and plan.config.input_tensors is not None:
        raise ConfigError(
            f"{plan.name} is an {plan.kind}: its inputs are indices, which have no scale.",
            code="invalid_config",
            hint=f"Remove input_tensors from its config ({plan.chosen_by}).",
            field="/input_tensors",
        )
    for field in ("input_tensors", "output_tensors"):
        spec = getattr(plan.config, field)
        if plan.kind in CONVOLUTIONS and spec is not None and spec.qscheme is not QSchemeType.per_tensor:
            raise ConfigError(
                f"{plan.name} is a {plan.kind}; its {field} are {spec.qscheme.value}.",
                code="invalid_config",
                hint="Activations of convolutions can be per_tensor: their last axis is space, not features.",
                field=f"/{field}",
            )
