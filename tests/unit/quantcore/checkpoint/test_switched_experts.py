"""Names and places of experts in the stacks of mlx-lm."""

import pytest

from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.checkpoint.switched_experts import stack_experts, stack_of, unstack_switched

MOE = "model.layers.3.mlp"


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        (f"{MOE}.experts.12.up_proj", f"{MOE}.switch_mlp.up_proj"),
        (f"{MOE}.experts.12.down_proj.scales", f"{MOE}.switch_mlp.down_proj.scales"),
        ("a.block_sparse_moe.experts.1.w2.weight", "a.block_sparse_moe.switch_mlp.down_proj.weight"),
        (f"{MOE}.gate.weight", f"{MOE}.gate.weight"),
        (f"{MOE}.shared_expert.up_proj", f"{MOE}.shared_expert.up_proj"),
        ("encoder.ffn.experts.expert_0.fc1.weight", "encoder.ffn.experts.expert_0.fc1.weight"),
    ],
)  # fmt: skip
def test_names_of_stacks(name: str, stack: str) -> None:
    assert stack_of(name) == stack


def test_experts_lie_in_the_stack_by_their_numbers() -> None:
    """Also if the checkpoint has them in the order of their names: 10 before 2."""
    one, other = TensorLayout("U32", (4, 6)), TensorLayout("BF16", (4,))
    names = {index: f"{MOE}.experts.{index}.up_proj.weight" for index in sorted(range(12), key=str)}
    stored, parts = stack_experts({**dict.fromkeys(names.values(), one), "norm.weight": other})
    stack = f"{MOE}.switch_mlp.up_proj.weight"
    assert stored == {stack: TensorLayout("U32", (12, 4, 6)), "norm.weight": other}
    for index, name in names.items():
        assert (parts[name].begin, parts[name].end) == (96 * index, 96 * index + 96)
        assert parts[name].shape == (4, 6) and parts[name].stack is not None and parts[name].stack.name == stack


def test_stacks_are_read_as_experts() -> None:
    stack = TensorHeader("U32", (2, 4, 6), "model.safetensors", 100, 292)
    tensors = {"a.block_sparse_moe.switch_mlp.up_proj.weight": stack}
    for model_type, projection in (("mixtral", "w3"), ("granitemoe", "up_proj")):
        found = unstack_switched(tensors, model_type)
        names = [f"a.block_sparse_moe.experts.{index}.{projection}.weight" for index in (0, 1)]
        assert list(found) == names
        assert [(found[name].begin, found[name].end, found[name].shape) for name in names] == [
            (100, 196, (4, 6)), (196, 292, (4, 6)),
        ]  # fmt: skip


def test_other_tensors_stay_as_they_are() -> None:
    empty = TensorHeader("U32", (10**12, 0, 6), "model.safetensors", 100, 100)
    flat = TensorHeader("U32", (4, 6), "model.safetensors", 100, 196)
    tensors = {"a.switch_mlp.up_proj.weight": empty, "b.switch_mlp.up_proj.weight": flat, "norm.weight": flat}
    assert unstack_switched(tensors, "qwen3_moe") == tensors
