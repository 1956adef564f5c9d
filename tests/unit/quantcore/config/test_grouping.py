"""Which values share a scale: shapes as documented, and nothing lost on the way there and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantcore.config.grouping import Grouping, activation_grouping, weight_grouping
from quantcore.config.quantization import QuantizationSpec


@given(shape=st.lists(st.integers(1, 6), min_size=2, max_size=4), data=st.data())
def test_join_undoes_split_for_any_shape(shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    length = shape[axis]
    size = data.draw(st.sampled_from([None, *[n for n in range(1, length + 1) if length % n == 0]]))
    kinds = [Grouping(), Grouping(axis=axis, size=size), Grouping(axis=axis, across=True)]
    if len(shape) == 2:
        kinds.append(Grouping(block=(data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8)))))
    x = torch.randn(shape)
    for grouping in kinds:
        split = grouping.split(x)
        assert tuple(split.shape[:2]) == grouping.num_scales(tuple(shape))
        assert torch.equal(grouping.join(split, tuple(shape)), x)


def test_groups_run_along_the_axis_that_is_named():
    x = torch.arange(24.0).reshape(4, 6)
    along_inputs = weight_grouping(QuantizationSpec(dtype="int4", qscheme="per_group", group_size=3)).split(x)
    assert along_inputs[0, 1].tolist() == [3, 4, 5]
    down = weight_grouping(QuantizationSpec(dtype="int4", qscheme="per_group", group_size=2, ch_axis=0)).split(x)
    assert down.shape == (6, 2, 2)
    assert down[1, 1].tolist() == [13, 19]


def test_the_whole_row_is_one_group():
    spec = QuantizationSpec(dtype="int4", qscheme="per_group", group_size=-1)
    assert weight_grouping(spec).num_scales((5, 12)) == (5, 1)


def test_a_convolution_has_one_scale_for_each_output_channel():
    spec = QuantizationSpec(dtype="int8", qscheme="per_channel")
    x = torch.randn(8, 3, 5, 5)
    assert torch.equal(weight_grouping(spec).split(x).amax(-1)[:, 0], x.amax((1, 2, 3)))


def test_ragged_blocks_are_filled_with_zeros():
    grouping = weight_grouping(QuantizationSpec(dtype="fp8_e4m3", qscheme="per_block", block_size=[4, 4]))
    x = torch.ones(6, 5)
    split = grouping.split(x)
    assert grouping.num_scales((6, 5)) == (2, 2)
    assert split.sum(-1).tolist() == [[16, 4], [8, 2]]


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, (1, 1)),
        ({"qscheme": "per_channel", "is_dynamic": True}, (6, 1)),
        ({"qscheme": "per_channel", "ch_axis": -1}, (32, 1)),
        ({"qscheme": "per_group", "group_size": 8, "is_dynamic": True}, (6, 4)),
    ],
)
def test_scales_of_activations(fields, shape):
    assert activation_grouping(QuantizationSpec(dtype="int8", **fields)).num_scales((2, 3, 32)) == shape
