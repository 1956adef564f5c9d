"""The windows on which estimates are made."""

import torch

from quantcore.engine.mixed_precision.sensitivity import NUM_PIECES, PIECE_LEN, in_pieces


def windows(num: int, length: int) -> torch.Tensor:
    return torch.arange(num * length).reshape(num, length)


def test_all_windows_give_their_beginning_before_any_gives_more() -> None:
    windows_NT = windows(40, 2 * PIECE_LEN + 7)
    pieces_NT = in_pieces(windows_NT)
    assert pieces_NT.shape == (NUM_PIECES, PIECE_LEN)
    assert torch.equal(pieces_NT[:40], windows_NT[:, :PIECE_LEN])
    assert torch.equal(pieces_NT[40:], windows_NT[: NUM_PIECES - 40, PIECE_LEN : 2 * PIECE_LEN])


def test_few_and_short_windows_are_used_as_they_are() -> None:
    assert torch.equal(in_pieces(windows(3, PIECE_LEN)), windows(3, PIECE_LEN))
    assert torch.equal(in_pieces(windows(5, 24)), windows(5, 24))
