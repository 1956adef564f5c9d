"""Every causal language model that the installed Transformers can build, as a twin: ours against its own forward pass.

A class is read right, to 1e-5, or it is refused, or its default config gives no model. What is in no list must be
right: a new release of Transformers shows at once what is new.
"""

import json

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quantcore.engine.model.tiny_model import tiny_config
from quantcore.engine.verification import architecture
from quantcore.errors import ModelError

CLASSES = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
REFUSED = {
    "hrm_text", "inkling2_text", "musicgen", "musicgen_melody", "prophetnet", "rwkv",
    "xlm", "zamba", "zamba2",
}  # fmt: skip
NO_TWIN = {
    "blt", "cohere_compass_text", "cpmant", "dbrx", "deepseek_v2", "dots1", "dots3_note", "dots3_note_text", "emu3",
    "falcon_h1",
    "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "glm4_moe", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "lfm2_moe", "ministral", "nemotron", "qwen4_exp", "qwen4_exp_text",
    "reformer", "xmod",
}  # fmt: skip
"""Default configs without a number that the model needs, with numbers that do not fit together, or of no decoder."""


def verdict_on(model_type):
    """The largest difference of the class's default config, or why there is none."""
    try:
        config = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
        found = architecture._compare_twin(json.dumps(tiny_config(config)))
    except ModelError as error:
        return error.code
    except Exception as error:  # a default config that its own class refuses
        return f"no config: {error}"
    return max(found["differences"]) if "differences" in found else f"no twin: {found['reason']}"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model_type", CLASSES)
def test_it_is_read_as_transformers_reads_it_or_refused(model_type):
    verdict = verdict_on(model_type)
    architecture._compare_twin.cache_clear()
    if model_type in REFUSED:
        assert verdict == "unsupported_architecture"
    elif model_type in NO_TWIN:
        assert str(verdict).startswith("no ")
    else:
        assert isinstance(verdict, float) and verdict < 1e-5, verdict
