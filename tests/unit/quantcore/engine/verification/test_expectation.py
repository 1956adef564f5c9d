"""What the pipeline records for the proof comes back whole."""

from pathlib import Path

import torch

from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.verification.expectation import ExpectedDigests


def test_the_text_comes_back_whole(tmp_path: Path) -> None:
    text = EvaluationText(
        torch.arange(12).view(3, 4), torch.ones(3, dtype=torch.long), num_words=5, num_bytes=20,
        targets_NP=torch.arange(9).view(3, 3), media=({}, {"pixels": torch.ones(2)}, {}),
        strata_N=torch.tensor([1, 0, 1]),
    )  # fmt: skip
    ExpectedDigests(text, torch.zeros(3, 2)).move_to(tmp_path)
    found = ExpectedDigests.load(tmp_path).held_out
    assert vars(found).keys() == vars(text).keys()
    for name, value in vars(text).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(found, name)), name
    assert (found.num_words, found.num_bytes) == (5, 20)
    assert [list(one) for one in found.media] == [[], ["pixels"], []]
