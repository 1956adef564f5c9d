"""Names of GGUF tensors, held against gguf's own tensor map."""

import gguf
import pytest

from quantcore.checkpoint.layout import TensorHeader
from quantcore.export.gguf.tensor_names import ARCHITECTURES, Place, Places

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}
NUM_BLOCKS = 12


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_name_is_that_of_gguf(model_type):
    architecture, places = ARCHITECTURES[model_type], Places({"model_type": model_type, **CONFIG})
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, NUM_BLOCKS)
    for module in architecture.blocks:
        ours = module.replace("experts.", "experts.3.")
        theirs = f"model.layers.11.{module}".replace("block_sparse_moe.experts", "feed_forward.experts")
        if "feed_forward" in theirs:
            theirs = theirs.removeprefix("model.")
        place = places.find(f"model.layers.11.{ours}.weight")
        assert place is not None and place.name == f"{names.get_name(theirs)}.weight"
        assert place.index == (3 if "experts" in module else None)
    for module in ("model.embed_tokens", "model.norm"):
        assert places.find(f"{module}.weight").name == f"{names.get_name(module)}.weight"


def test_places():
    llama, gemma = (Places({"model_type": name, **CONFIG}) for name in ("llama", "gemma2"))
    assert llama.find("model.layers.3.self_attn.q_proj.bias") == Place("blk.3.attn_q.bias", num_heads=4)
    assert llama.find("model.layers.3.self_attn.k_proj.weight") == Place("blk.3.attn_k.weight", num_heads=2)
    assert llama.find("lm_head.weight") == Place("output.weight") and gemma.find("lm_head.weight") is None
    assert gemma.find("model.norm.weight") == Place("output_norm.weight", offset=1.0)
    assert gemma.find("model.layers.0.self_attn.q_proj.weight") == Place("blk.0.attn_q.weight")
    assert llama.find("model.layers.3.self_attn.nothing.weight") is None


def test_what_is_computed_anyway_is_left_out():
    places = Places({"model_type": "llama", **CONFIG})
    header = TensorHeader("F32", (8,), "model.safetensors", 0, 32)
    assert places.layout("model.layers.0.self_attn.rotary_emb.inv_freq", header) is None
    assert places.layout("model.norm.weight", header).dtype == "F32"
