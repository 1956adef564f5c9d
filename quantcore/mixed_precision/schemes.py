"""The schemes that a mix is chosen from: what their names stand for, and what each would be alone. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from quantcore.config import presets
from quantcore.config.algorithms import AlgoConfig
from quantcore.config.job_spec import KEEP, MixConfig, ResolvedMix
from quantcore.config.quantization import Config
from quantcore.errors import QuantError
from quantcore.plan.resolve import Plan

Plans = dict[str, tuple[Config, Plan]]
PlanOf = Callable[[Config], Plan]
PLAN_FIELDS = ("calibration", "export", "shard_blocks")
"""A task's fields that a plan may reject, beside its config."""


def resolve(asked: MixConfig, known: Mapping[str, presets.Preset] = presets.PRESETS) -> ResolvedMix:
    """With the configs of the presets. Raises ConfigError ``unknown_preset``."""
    configs = {}
    for name in asked.schemes:
        if name != KEEP:
            with _at_scheme(asked, name):
                configs[name] = presets.resolve(name, presets=known)
    return ResolvedMix(**asked.model_dump(), configs=configs)


def plan_each(mix: ResolvedMix, plan_of: PlanOf, algorithms: Sequence[AlgoConfig] = ()) -> Plans:
    """Each scheme for all layers, with these algorithms and no others.

    Raises ConfigError, also for a format that does not take a layer in one scheme among others in another one.
    """
    found: Plans = {}
    for name, given in mix.configs.items():
        config = replace(given, algo_config=tuple(algorithms))
        with _at_scheme(mix, name):
            found[name] = (config, plan_of(config))
            (usual, plan), *others = found.values()
            if others:
                plan_of(replace(usual, layer_quant_config={plan.layers[0].name: config.global_quant_config}))
    return found


def upper_bound(mix: ResolvedMix, plans: Plans) -> Plan:
    """What can be said before anything is measured: the plan of the scheme that takes most, and no more than the
    budget."""
    name, (_, dearest) = max(plans.items(), key=lambda one: one[1][1].size_after_bytes)
    most = dearest.size_before_bytes if KEEP in mix.schemes else dearest.size_after_bytes
    return replace(
        dearest,
        size_after_bytes=min(most, mix.max_bytes or most),
        footprint=max((plan for _, plan in plans.values()), key=lambda plan: plan.peak_memory_bytes).footprint,
        warnings=(
            *dearest.warnings,
            f"The scheme of each layer is chosen when the job runs. Planned is what it may take at most: {name} for"
            " all layers.",
        ),
    )


@contextmanager
def _at_scheme(asked: MixConfig, name: str) -> Iterator[None]:
    """Errors inside are told to be of this scheme, unless they are of another field of the task."""
    try:
        yield
    except QuantError as error:
        if error.field.split("/")[1:2] not in [[field] for field in PLAN_FIELDS]:
            error.field = f"/mix/schemes/{asked.schemes.index(name)}"
        raise
