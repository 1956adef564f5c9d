"""``bitfoundry speed`` with the programs that have environments of their own (``make consumers``)."""

import pytest

from quantcore import presets
from quantcore.evaluation.speed import Load, speed
from quantcore.events import silence
from tests.consumers.test_consumers import ROOT, export_all, smollm2  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LOAD = Load(prompt_len=64, num_new=8, repeats=1)


@pytest.mark.parametrize(
    ("runtime", "environment", "preset", "export", "place"),
    [
        ("vllm", "vllm", "int8_dynamic", "compressed_tensors", "compressed_tensors"),
        ("llama_cpp", "llamacpp", "gguf_q8_0", "gguf", "model.gguf"),
    ],
)
def test_a_program_serves_the_files(smollm2, tmp_path, runtime, environment, preset, export, place):  # noqa: F811
    results, _ = export_all(smollm2, {preset: presets.resolve(preset)}, (export,), tmp_path)
    folder, _ = results[preset]
    model = folder / place if (folder / place).exists() else folder
    python = ROOT / ".venv-consumers" / environment / "bin" / "python"
    found = speed(str(model), None, LOAD, silence, runtime=runtime, python=str(python))
    assert (found["runtime"], found["model"]["prompt_tokens_per_s"] > 1) == (runtime, True)
    assert found["model"]["new_tokens_per_s"] > 0.5
    assert found["model"]["peak_memory_bytes"] > 134e6, "the weights take a byte each"
