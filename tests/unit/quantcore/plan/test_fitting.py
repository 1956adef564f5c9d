"""What a search chooses from, and what its first candidate can be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantcore.checkpoint.headers import read_local
from quantcore.config.algorithms import RTNConfig
from quantcore.config.goal import Goal
from quantcore.config.job_spec import DEFAULT_EXPORTS, NO_SCHEME
from quantcore.config.quantization import CalibrationConfig, Config
from quantcore.plan.fitting import fit, possible_chains, upper_bound
from tests.support.models import tiny_model

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
    assert possible_chains(Goal.model_validate(goal), Config(global_quant_config=NO_SCHEME)) == chains
    with_imatrix = Config(global_quant_config=NO_SCHEME, algo_config=(RTNConfig(imatrix="im.gguf"),))
    assert possible_chains(Goal.model_validate(goal), with_imatrix) == (("rtn",),)


@pytest.mark.parametrize("width", [256, 288], ids=["K-quants divide the rows", "K-quants do not"])
def test_other_types_are_tried_where_they_are_smaller_than_k_quants(tmp_path: Path, width: int) -> None:
    model = tiny_model(tmp_path, hidden_size=width, intermediate_size=2 * width)
    goal = Goal.model_validate({"runtime": "llama_cpp", "device": "cpu"})
    found = fit(goal, read_local(model), CalibrationConfig(seq_len=64), DEFAULT_EXPORTS)
    smaller = {"gguf_q4_0"} if width == 256 else {"gguf_q4_0", "gguf_q4_1"}  # the head is larger in gguf_q4_k
    assert {*found.plans} == {"gguf_q4_k", "gguf_q5_k", "gguf_q6_k", "gguf_q8_0", *smaller}
    assert found.smallest_bytes == found.plans["gguf_q4_0"][1].size_after_bytes


def test_the_plan_of_a_goal_has_the_notes_and_the_stored_size_of_its_model(tmp_path: Path) -> None:
    headers = replace(
        read_local(tiny_model(tmp_path)), warnings=("The model was trained for another task.",), stored_bytes=123_456
    )
    goal = Goal.model_validate({"runtime": "vllm", "device": "24GB"})
    plan = upper_bound(fit(goal, headers, CalibrationConfig(seq_len=64), DEFAULT_EXPORTS))
    assert plan.warnings[0] == headers.warnings[0]
    assert plan.size_before_bytes == 123_456
