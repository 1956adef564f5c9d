"""The roles for which layers are kept, as they are named in checkpoints of well-known models."""

import pytest

from quantcore.checkpoint.roles import GATE, INDEXER, LATENT, ROUTER, find_roles, role_outside_blocks

LAYER = "model.layers.0."
QWEN3_NEXT = {
    "linear_attn.A_log": (32,),
    "linear_attn.in_proj_qkvz.weight": (12288, 2048),
    "linear_attn.in_proj_ba.weight": (64, 2048),
    "linear_attn.out_proj.weight": (2048, 4096),
    "linear_attn.conv1d.weight": (8192, 1, 4),
    "mlp.experts.gate_up_proj": (512, 1024, 2048),
    "mlp.gate.weight": (512, 2048),
    "mlp.shared_expert_gate.weight": (1, 2048),
    "mlp.shared_expert.up_proj.weight": (512, 2048),
}
KIMI_LINEAR = {
    "self_attn.A_log": (1, 1, 32, 1),
    "self_attn.b_proj.weight": (32, 2304),
    "self_attn.f_a_proj.weight": (128, 2304),
    "self_attn.f_b_proj.weight": (4096, 128),
}
DEEPSEEK_V32 = {
    "self_attn.indexer.wq_b.weight": (8192, 1536),
    "self_attn.indexer.wk.weight": (128, 7168),
    "self_attn.indexer.weights_proj.weight": (64, 7168),
}
NEMOTRON_3 = {
    "mixer.fc1_latent_proj.weight": (1024, 4096),
    "mixer.fc2_latent_proj.weight": (4096, 1024),
    "mixer.experts.0.up_proj.weight": (2688, 1024),
    "mixer.gate.weight": (512, 4096),
}
MAMBA = {
    "mixer.A_log": (5120, 16),
    "mixer.D": (5120,),
    "mixer.dt_proj.weight": (5120, 160),
    "mixer.x_proj.weight": (192, 5120),
}
MAMBA_2 = {"mamba.A_log": (128,), "mamba.in_proj.weight": (16768, 4096), "mamba.out_proj.weight": (4096, 8192)}
ROLES = {
    "Qwen3-Next": (
        QWEN3_NEXT,
        {"linear_attn.in_proj_ba": GATE, "mlp.gate": ROUTER, "mlp.shared_expert_gate": ROUTER},
    ),
    "Kimi Linear": (KIMI_LINEAR, {"self_attn.b_proj": GATE}),
    "DeepSeek-V3.2": (DEEPSEEK_V32, {"self_attn.indexer.weights_proj": INDEXER}),
    "Nemotron 3": (
        NEMOTRON_3,
        {"mixer.fc1_latent_proj": LATENT, "mixer.fc2_latent_proj": LATENT, "mixer.gate": ROUTER},
    ),
    "Mamba": (MAMBA, {}),
    "Mamba 2": (MAMBA_2, {}),
}


@pytest.mark.parametrize("model", list(ROLES))
def test_layers_are_kept_for_the_role_that_their_shapes_and_names_tell(model):
    shapes, roles = ROLES[model]
    found = find_roles({LAYER + name: shape for name, shape in shapes.items()})
    assert found == {LAYER + name: role for name, role in roles.items()}


@pytest.mark.parametrize(
    ("module", "role"),
    [
        ("model.visual.blocks.3.attn.qkv", "part outside the language model"),
        ("model.visual.merger.linear_fc1", "projector between parts of the model"),
        ("multi_modal_projector.linear_1", "projector between parts of the model"),
        ("mtp.layers.0.self_attn.q_proj", "only for multi-token prediction"),
        ("score", "score head"),
        ("classifier.dense", "score head"),
        ("model.decoder.project_in", "outside the blocks"),
    ],
)
def test_what_lies_outside_the_blocks_is_described(module, role):
    assert role_outside_blocks(module) == role
