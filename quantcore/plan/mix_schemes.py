"""The candidate schemes of a mix: the configs behind their names, and the plan of each scheme alone. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from quantcore.config import presets
from quantcore.config.algorithms import AlgoConfig
from quantcore.config.job_spec import KEEP, MixConfig, ResolvedMix
from quantcore.config.quantization import Config
from quantcore.errors import ConfigError, QuantError
from quantcore.plan.planner import Plan

Plans = dict[str, tuple[Config, Plan]]
PlanOf = Callable[[Config], Plan]
PLAN_FIELDS = ("calibration", "export", "shard_blocks")
"""Fields of a task, other than its config, that a plan may reject."""


def resolve(mix: MixConfig, known_presets: Mapping[str, presets.Preset] = presets.PRESETS) -> ResolvedMix:
    """Add the configs of the presets to a mix. Raises ConfigError ``unknown_preset``, or for a mix of llama.cpp."""
    configs = {}
    for name in mix.schemes:
        if name != KEEP:
            with _at_scheme(mix, name):
                configs[name] = presets.resolve(name, presets=known_presets)
                if (types := configs[name].gguf) is not None and types.names_tensors:
                    raise ConfigError(
                        f"{name} is a mix of types itself, so no layer can have it as its scheme.",
                        code="invalid_config",
                        hint="Use the types, such as gguf_q4_k and gguf_q6_k.",
                    )
    return ResolvedMix(**mix.model_dump(), configs=configs)


def plan_each(mix: ResolvedMix, plan_of: PlanOf, algorithms: Sequence[AlgoConfig] = ()) -> Plans:
    """Plan each scheme for all layers, with these algorithms and no others.

    Raises ConfigError, also for a format that cannot mix a scheme with another one.
    """
    plans: Plans = {}
    for name, scheme in mix.configs.items():
        config = replace(scheme, algo_config=tuple(algorithms))
        with _at_scheme(mix, name):
            plans[name] = (config, plan_of(config))
            (usual, plan), *others = plans.values()
            if others:
                plan_of(replace(usual, layer_quant_config={plan.layers[0].name: config.global_quant_config}))
    return plans


def upper_bound(mix: ResolvedMix, plans: Plans) -> Plan:
    """Return the plan before any measurement: the plan of the largest scheme, limited to the budget."""
    name, (_, dearest) = max(plans.items(), key=lambda item: item[1][1].size_after_bytes)
    most = dearest.float_bytes if KEEP in mix.schemes else dearest.size_after_bytes
    return replace(
        dearest,
        size_after_bytes=min(most, mix.max_bytes or most),
        footprint=max((plan for _, plan in plans.values()), key=lambda plan: plan.peak_memory_bytes).footprint,
        warnings=(
            *dearest.warnings,
            f"The scheme of each layer is chosen when the job runs. The plan shows the upper bound: {name} for all "
            "layers.",
        ),
    )


@contextmanager
def _at_scheme(mix: MixConfig, name: str) -> Iterator[None]:
    """Attribute errors inside to this scheme, unless they belong to another field of the task."""
    try:
        yield
    except QuantError as error:
        if error.field.split("/")[1:2] not in [[field] for field in PLAN_FIELDS]:
            error.field = f"/mix/schemes/{mix.schemes.index(name)}"
        raise
