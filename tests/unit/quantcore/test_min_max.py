"""The running range: order, shapes, merging, NaN and empty batches."""

import pytest
import torch

from quantcore.observers.min_max import MinMax


def test_any_split_gives_the_range_of_the_whole():
    x = torch.randn(7, 33)
    observer, left, right = MinMax(), MinMax(), MinMax()
    observer.update(x)
    left.update(x[:2].reshape(2, 3, 11))
    right.update(x[2:].bfloat16().float())
    right.update(x[2:])
    right.merge(left)
    assert right.range()[0] == min(x.min(), x[2:].bfloat16().float().min())
    assert observer.range() == (x.min(), x.max())
    assert observer.num_values == 231


def test_nan_and_infinity_are_not_hidden():
    observer = MinMax()
    observer.update(torch.tensor([1.0, float("nan")]))
    observer.update(torch.tensor([2.0]))
    assert torch.isnan(torch.stack(observer.range())).all()
    other = MinMax()
    other.update(torch.tensor([float("-inf"), 3.0]))
    assert other.range()[0] == float("-inf") and other.range()[1] == 3.0


def test_nothing_seen_is_an_error_and_an_empty_batch_changes_nothing():
    observer = MinMax()
    observer.update(torch.empty(0, 5))
    observer.merge(MinMax())
    with pytest.raises(ValueError, match="no value"):
        observer.range()
