"""Choosing among schemes, held against trying every combination."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from quantcore.config import presets
from quantcore.config.job_spec import MixConfig, check_mix
from quantcore.config.quantization import parse_config
from quantcore.config.task import Task
from quantcore.engine.mixed_precision.command import bytes_of
from quantcore.errors import ConfigError
from quantcore.plan.mix_choice import Mix, Option, Unit, hull, mixes, of_size
from quantcore.plan.mix_schemes import resolve


def units_of(seed: int, num: int = 5) -> list[Unit]:
    """Units of other sizes and losses, with schemes that are never worth it among them."""
    draw = random.Random(seed)
    found = []
    for number in range(num):
        weights = draw.randint(1, 9) * 100
        options = [Option(f"s{bits}", weights * bits // 8, draw.uniform(0, 2) / 4**bits) for bits in (2, 3, 4, 8)]
        found.append(Unit(number, (f"layer{number}",), weights, tuple(options)))
    return found


def best_of_size(units: list[Unit], max_bytes: int) -> float:
    every = (Mix(one) for one in itertools.product(*(unit.options for unit in units)))
    return min(mix.loss for mix in every if mix.num_bytes <= max_bytes)


@pytest.mark.parametrize("seed", range(12))
def test_no_mix_of_the_same_size_is_better(seed: int) -> None:
    units = units_of(seed)
    found = mixes(units)
    assert len(found) > 3
    for before, after in itertools.pairwise(found):
        assert after.num_bytes > before.num_bytes and after.loss < before.loss
    for mix in found:
        assert mix.loss == pytest.approx(best_of_size(units, mix.num_bytes), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_budget_for_size_is_kept_and_used(seed: int) -> None:
    units = units_of(seed)
    sizes = [sum(option.num_bytes for option in unit.options) for unit in units]
    step = max(max(o.num_bytes for o in u.options) - min(o.num_bytes for o in u.options) for u in units)
    for share in (0.3, 0.5, 0.7, 1.0):
        max_bytes = int(share * sum(sizes))
        mix = of_size(units, max_bytes)
        assert mix.num_bytes <= max_bytes
        assert best_of_size(units, max_bytes) <= mix.loss <= best_of_size(units, max_bytes - step) + 1e-12


def test_a_step_that_does_not_fit_does_not_end_the_choice() -> None:
    large = Unit(0, ("a",), 1, (Option("few", 10, 1.0), Option("many", 110, 0.0)))
    small = Unit(1, ("b",), 1, (Option("few", 10, 0.01), Option("many", 20, 0.0)))
    assert [option.scheme for option in of_size([large, small], 60).chosen] == ["few", "many"]


def test_what_is_larger_and_no_better_is_never_taken() -> None:
    small, worse, better, same = (Option("a", 1, 0.5), Option("b", 2, 0.7), Option("c", 4, 0.1), Option("d", 4, 0.2))
    assert hull([worse, same, better, small]) == [small, better]
    above = Option("e", 2, 0.4)  # above the line from small to better
    assert hull([small, above, better]) == [small, better]
    below = Option("f", 2, 0.2)
    assert hull([small, below, better]) == [small, below, better]


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"need at least .* bytes") as refused:
        of_size(units_of(0), 10)
    assert refused.value.code == "budget_too_small"


@pytest.mark.parametrize("budget", [
    {}, {"max_size": "1GB", "max_bits": 4.0}, {"max_bits": 0.0}, {"max_divergence": -1.0}, {"max_size": 0},
    {"max_bits": float("nan")}, {"max_bits": float("inf")},
])  # fmt: skip
def test_budgets_that_cannot_be(budget: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one budget, above 0") as refused:
        MixConfig(schemes=("fp8", "keep"), **budget)
    assert (refused.value.code, refused.value.field) == ("invalid_budget", "/mix")


def test_what_a_budget_leaves_to_the_units() -> None:
    units, schemes = units_of(0), ("fp8", "keep")
    in_all = sum(unit.num_weights for unit in units)
    assert bytes_of(MixConfig(schemes=schemes, max_bits=4.0), units, 12345) == in_all // 2
    for size in (20_000, "20KB"):
        assert bytes_of(MixConfig(schemes=schemes, max_size=size), units, 12_000) == 8_000


def test_a_config_beside_a_mix_says_algorithms_alone() -> None:
    algorithms = parse_config({"global_quant_config": {}, "algo_config": [{"name": "gptq"}]})
    check_mix(algorithms, file2file=False)
    for name in ("exclude", "global_quant_config"):
        more = {"exclude": ("lm_head",), "global_quant_config": presets.resolve("fp8").global_quant_config}
        with pytest.raises(ConfigError, match=name) as refused:
            check_mix(replace(algorithms, **{name: more[name]}), file2file=False)
        assert (refused.value.code, refused.value.field) == ("unsupported_config", f"/{name}")
    with pytest.raises(ConfigError) as refused:
        check_mix(algorithms, file2file=True)
    assert refused.value.field == "/file2file"


def test_names_become_configs_and_stay_in_a_task() -> None:
    asked = resolve(MixConfig(schemes=("w4a16", "keep", "fp8"), max_bits=5))
    assert asked.configs == {name: presets.resolve(name) for name in ("w4a16", "fp8")}
    nothing = parse_config({"global_quant_config": {}})
    task = Task(model_dir="/m", output_dir="/o", config=nothing, mix=asked)
    assert Task.model_validate_json(task.model_dump_json()) == task
    with pytest.raises(ConfigError, match="every scheme except keep"):
        Task(
            model_dir="/m",
            output_dir="/o",
            config=nothing,
            mix={"schemes": ["fp8", "keep"], "max_bits": 5, "configs": {}},
        )
