"""How much a block may change when scales are moved."""

import pytest
import torch
from torch import nn

from quantcore.engine.blockwise.running_block import CalibrationStreams, RunningBlock
from quantcore.engine.blockwise.smoother import check_fold
from quantcore.engine.model.experts import linear_of
from quantcore.errors import NumericsError


def running(name):
    """Return a block with one linear layer, of this name."""
    block = linear_of(torch.ones(4, 4))
    for part in reversed(name.split(".")):
        block = nn.ModuleDict({part: block})
    return RunningBlock(block, 0, CalibrationStreams(None))


@pytest.mark.parametrize("expert", ["mlp.experts.0.up_proj", "mlp.experts.expert_0.wi"])
def test_a_rounded_router_may_send_a_token_elsewhere(expert):
    """Whatever the form of the experts; in float32 nothing is rounded."""
    check_fold(running(expert), 0.2, torch.bfloat16)
    for at, error, dtype in (
        (running("mlp.up_proj"), 0.2, torch.bfloat16),
        (running(expert), 0.4, torch.bfloat16),
        (running(expert), 0.2, torch.float32),
    ):
        with pytest.raises(NumericsError, match="Moving scales changed") as caught:
            check_fold(at, error, dtype)
        assert caught.value.code == "fold_changed_the_model"
