"""Plans the schemes that a goal chooses from, and the size that the result may have, from headers only. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from quantcore.checkpoint.headers import ModelHeaders
from quantcore.config.goal import Goal
from quantcore.config.job_spec import DEFAULT_EXPORTS, KEEP, JobSpec, MixConfig, ResolvedMix, conflicting_goal
from quantcore.config.presets import PRESETS, with_kv_cache
from quantcore.config.quantization import CalibrationConfig, Config
from quantcore.config.recipes import DEFAULT_EFFORT, recipe
from quantcore.errors import ConfigError
from quantcore.plan.mix_schemes import Plans, plan_each, resolve
from quantcore.plan.planner import Plan, make_plan
from quantcore.plan.runtimes import (
    SUPPORTED_SCHEMES,
    Scheme,
    kv_cache_bytes,
    kv_cache_scheme,
    schemes_for,
    weight_limit_bytes,
)


@dataclass(frozen=True)
class Fit:
    """The plan of each single scheme, in the format ``export``; the KV cache; and the limit of all weights.

    ``kv_cache`` is the scheme of the cache (None: 16 bits), ``cache_bytes`` its size. ``max_bytes`` is None if any size
    fits; ``other_bytes``, for headers, a tokenizer or a graph in the files, are taken off it already.
    """

    export: str
    plans: Plans
    kv_cache: str | None
    cache_bytes: int
    max_bytes: int | None
    other_bytes: int = 0

    @property
    def smallest_bytes(self) -> int:
        return min(plan.size_after_bytes for _, plan in self.plans.values())


def fit(goal: Goal, headers: ModelHeaders, calibration: CalibrationConfig, exports: Sequence[str]) -> Fit:
    """Plan the schemes of a goal. The KV cache is quantized if nothing fits otherwise and the runtime can do it.

    ``exports`` are the formats of the job: the default, or the one that the goal's runtime reads. Raises ConfigError
    ``goal_too_small`` if nothing fits, and ``conflicting_goal`` for other formats.
    """
    if tuple(exports) not in ((SUPPORTED_SCHEMES[goal.runtime].export,), DEFAULT_EXPORTS):
        raise conflicting_goal("export")
    cache_bytes = kv_cache_bytes(headers.config, goal.context)
    found = _fit(goal, headers, calibration, None, cache_bytes)
    scheme = kv_cache_scheme(goal)
    if not _fits(found) and scheme is not None:
        found = _fit(goal, headers, calibration, scheme, cache_bytes // 2)
    _check_fits(goal, found)
    return found


def within_files(goal: Goal, found: Fit, other_bytes: int) -> Fit:
    """Return ``found`` with a limit that keeps the files, including ``other_bytes`` besides weights, within max_size.

    Raises ConfigError ``goal_too_small`` if nothing fits.
    """
    assert goal.max_bytes is not None and found.max_bytes is not None
    limit = min(found.max_bytes, goal.max_bytes - other_bytes)
    found = replace(found, max_bytes=limit, other_bytes=other_bytes)
    _check_fits(goal, found)
    return found


def upper_bound(found: Fit) -> Plan:
    """Return the plan before anything is measured: that of the largest scheme, at most of the size that fits."""
    name, (_, dearest) = max(found.plans.items(), key=lambda item: item[1][1].size_after_bytes)
    return replace(
        dearest,
        size_after_bytes=min(dearest.size_after_bytes, found.max_bytes or dearest.size_after_bytes),
        footprint=max((plan for _, plan in found.plans.values()), key=lambda plan: plan.peak_memory_bytes).footprint,
        warnings=(
            *dearest.warnings,
            f"The scheme of each layer is chosen from {', '.join(found.plans)} by measuring candidates when the job "
            f"runs. The plan shows the upper bound: {name} for all layers.",
        ),
    )


def possible_chains(goal: Goal, given: Config) -> tuple[tuple[str, ...], ...]:
    """Return the chains of algorithms, by name, that the first candidate can have: one for each kind of mix.

    If the config ``given`` beside the goal has algorithms, they are those of all candidates.
    """
    if given.algo_config:
        return (tuple(algorithm.name for algorithm in given.algo_config),)
    configs = [PRESETS[scheme.preset].config for scheme in schemes_for(goal)]
    mixes = chain.from_iterable(combinations(configs, size) for size in range(len(configs), 0, -1))
    effort = DEFAULT_EFFORT if goal.max_divergence is not None else "best"
    return tuple(dict.fromkeys(tuple(algorithm.name for algorithm in recipe(mix, effort)) for mix in mixes))


def megabytes(size: int) -> str:
    """Return a size as text: ``94.1 MB``, ``4.20 GB``."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _fit(
    goal: Goal, headers: ModelHeaders, calibration: CalibrationConfig, kv_cache: str | None, cache_bytes: int
) -> Fit:
    menu, export = schemes_for(goal), SUPPORTED_SCHEMES[goal.runtime].export
    names = tuple(scheme.preset for scheme in menu)
    request = resolve(MixConfig(schemes=names if len(names) > 1 else (*names, KEEP), max_bits=32.0))
    configs = dict(request.configs)
    if kv_cache is not None:
        configs = {name: with_kv_cache(config, kv_cache) for name, config in configs.items()}

    def plan_of(config: Config) -> Plan:
        spec = JobSpec(config=config, calibration=calibration, export=(export,))
        return make_plan(spec, headers, num_schemes=len(names))

    schemes = ResolvedMix(**request.model_dump(exclude={"configs"}), configs=configs)
    max_bytes = weight_limit_bytes(goal, cache_bytes)
    return Fit(export, _worth_it(plan_each(schemes, plan_of), menu), kv_cache, cache_bytes, max_bytes)


def _worth_it(plans: Plans, menu: Sequence[Scheme]) -> Plans:
    """Leave out the schemes for which another one is better in at most as many bytes."""
    sizes = {name: plan.size_after_bytes for name, (_, plan) in plans.items()}
    bounds = {scheme.preset: sizes[scheme.if_smaller_than] for scheme in menu if scheme.if_smaller_than}
    return {name: plan for name, plan in plans.items() if name not in bounds or sizes[name] < bounds[name]}


def _check_fits(goal: Goal, found: Fit) -> None:
    if _fits(found):
        return
    others = f"; the files contain {megabytes(found.other_bytes)} besides the weights" if found.other_bytes else ""
    raise ConfigError(
        f"The smallest result for {goal.runtime} has {megabytes(found.smallest_bytes)}, but the limit of "
        f"{goal.max_size or goal.device} is {megabytes(max(0, found.max_bytes or 0))} after reserving "
        f"{megabytes(found.cache_bytes)} for the KV cache of {goal.context} tokens{others}.",
        code="goal_too_small",
        hint="Raise the limit (max_size, device), shorten the context, or use another runtime.",
        field="/goal",
    )


def _fits(found: Fit) -> bool:
    return found.max_bytes is None or found.smallest_bytes <= found.max_bytes
