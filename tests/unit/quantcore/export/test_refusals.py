"""A format that cannot hold a scheme: the error says what can, and that is so."""

import re

import pytest

from quantcore.config.layer_plan import usual_layers
from quantcore.config.presets import PRESETS, resolve
from quantcore.errors import ConfigError
from quantcore.export import EXPORTERS, adapted, check_exports


def refusal(preset, export):
    """The error for a preset in a format, as in a plan; None if the format can hold it."""
    layers = usual_layers(resolve(preset))
    try:
        check_exports(adapted(layers, (export,))[0], (export,), layers)
    except ConfigError as error:
        return error
    return None


CAN = {(preset, export) for preset in PRESETS for export in EXPORTERS if refusal(preset, export) is None}


@pytest.mark.parametrize("export", [*EXPORTERS])
def test_the_error_names_what_can_hold_it(export):
    for preset in PRESETS:
        if (error := refusal(preset, export)) is not None:
            assert {*error.allowed} == {other for other in EXPORTERS if (preset, other) in CAN}, preset
            named = re.search(rf"Presets that {export} can store: (.*?)( and \d+ more)?\. Formats", error.hint)[1]
            assert {(name, export) for name in named.split(", ")} <= CAN, preset


def test_presets_with_the_same_dtype_come_first():
    hint = refusal("w4a16", "gguf").hint
    assert hint.startswith("Presets that gguf can store: uint4_wo_32, gguf_q4_1, gguf_q4_k, ")
    assert hint.endswith("Formats that can store these layers: awq, compressed_tensors, quark, gptq_v2, onnx, "
                         "fake_quantized.")  # fmt: skip
