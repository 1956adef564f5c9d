"""The clipped share by kind of tensor."""

from __future__ import annotations

import torch

from quantcore.evaluation.clipping import Clipping


def test_blocks_and_experts_of_one_kind_count_together_by_their_numbers_of_values():
    counts = {
        "model.layers.0.self_attn.q_proj input": (torch.tensor(1), 100),
        "model.layers.1.self_attn.q_proj input": (torch.tensor(5), 200),
        "model.layers.1.self_attn.q_proj output": (torch.tensor(0), 50),
        "model.layers.0.mlp.experts.3.down_proj input": (torch.tensor(3), 10),
        "model.layers.0.mlp.experts.4.down_proj input": (torch.tensor(0), 0),  # no token reached it
    }
    shares = Clipping(counts).by_kind()
    assert shares == {"q_proj input": 0.02, "q_proj output": 0.0, "down_proj input": 0.3}
    assert Clipping().by_kind() == {}
