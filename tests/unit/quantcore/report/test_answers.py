"""Where two answers part."""

import pytest

from quantcore.report.answers import common_length, first_difference


@pytest.mark.parametrize(
    ("original", "quantized", "so_far", "whole"),
    [
        ([1, 2, 3], [1, 2, 3], None, None),
        ([1, 2, 3], [1, 4, 3], 1, 1),
        ([1, 2], [1, 2, 3], None, 2),  # the original ended; before that it may only be behind
        ([1, 2, 3], [1, 2], None, 2),
        ([], [], None, None),
        ([0, 1], [1, 1], 0, 0),
    ],
)
def test_the_first_difference(original: list[int], quantized: list[int], so_far: int | None, whole: int | None) -> None:
    assert first_difference(original, quantized, are_whole=False) == so_far
    assert first_difference(original, quantized, are_whole=True) == whole


@pytest.mark.parametrize(
    ("text", "other", "length"), [("abc", "abd", 2), ("abc", "ab", 2), ("", "ab", 0), ("x", "y", 0)]
)
def test_the_common_beginning(text: str, other: str, length: int) -> None:
    assert common_length(text, other) == length
