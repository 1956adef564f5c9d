"""Which layers runtimes compute in one product: known by their names, in one place."""

import pytest

from quantcore.checkpoint.fused import fused_groups, group_of, is_last


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a.v_proj", "a.q_proj", "a.o_proj", "a.k_proj"], [["a.q_proj", "a.k_proj", "a.v_proj"]]),
        (["a.q_proj", "b.k_proj"], []),
        (["m.up_proj", "m.gate_proj", "m.down_proj"], [["m.gate_proj", "m.up_proj"]]),
        (["m.w3", "m.w2", "m.w1"], [["m.w1", "m.w3"]]),
        (["m.experts.0.w1", "m.experts.1.w2", "m.gate"], [["m.experts.0.w1", "m.experts.1.w2"]]),
        (["m.experts.0.up_proj", "n.experts.0.up_proj"], []),
        (["m.shared_experts.up_proj", "m.experts.0.up_proj"], []),
    ],
)
def test_groups_are_of_one_module(names, groups):
    assert list(fused_groups(names).values()) == groups


def test_a_layer_that_no_runtime_fuses_has_no_group():
    assert group_of("a.o_proj") is None and group_of("lm_head") is None and not is_last("a.o_proj")
    assert [is_last(f"a.{part}") for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")] == [
        False, False, True, False, True,
    ]  # fmt: skip
