"""Tokens are drawn from the model's predictions, and their log probability has the gradient that it must have."""

import torch

from quantcore.engine.blockwise.backward import log_p_of_drawn

NUM_DRAWS = 20_000


def drawn_share(logits_V: torch.Tensor) -> torch.Tensor:
    """The share of draws that each token got, read from the gradient: d log p(y) / d logits = onehot(y) - p."""
    logits_TV = logits_V.repeat(NUM_DRAWS, 1).requires_grad_()
    log_p_of_drawn(logits_TV, torch.Generator().manual_seed(0)).backward()
    assert logits_TV.grad is not None
    onehot_TV = logits_TV.grad + logits_V.softmax(-1)
    assert torch.allclose(onehot_TV, onehot_TV.round(), atol=1e-5) and (onehot_TV.round().sum(-1) == 1).all()
    return onehot_TV.round().mean(0)


def test_tokens_are_drawn_as_often_as_they_are_predicted() -> None:
    logits_V = torch.tensor([-1.0, 2.0, 0.5, -torch.inf, 1.0, -torch.inf])
    p_V = logits_V.softmax(-1)
    deviation_V = (p_V * (1 - p_V) / NUM_DRAWS).sqrt()
    assert ((drawn_share(logits_V) - p_V).abs() <= 4 * deviation_V).all()


def test_a_certain_token_is_always_drawn() -> None:
    for certain in (0, 2):
        logits_V = torch.full((3,), -torch.inf).index_fill(0, torch.tensor(certain), 0.0)
        assert drawn_share(logits_V)[certain] == 1
