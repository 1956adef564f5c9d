"""What the first candidate of a search can be."""

from typing import Any

import pytest

from quantcore.config.goal import Goal
from quantcore.goal.fitting import possible_chains

CHAINS: dict[str, tuple[dict[str, Any], tuple[tuple[str, ...], ...]]] = {
    "few bits or eight": ({"runtime": "vllm", "device": "24GB"}, (("gptq",), ())),
    "the best": ({"runtime": "vllm", "device": "24GB", "min_recovery": "best"}, (("yaqa",), ("gptaq",))),
    "eight bits beside few": (
        {"runtime": "vllm", "device": "h100", "min_recovery": "best"}, (("gptaq",), ("yaqa",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHAINS)
def test_the_chain_follows_from_the_schemes_that_a_candidate_mixes(case: str) -> None:
    goal, chains = CHAINS[case]
    assert possible_chains(Goal.model_validate(goal)) == chains
