"""Serving by programs in their own environments (``make consumers``): ``bitfoundry speed`` and ``evaluate --vllm``."""

import pytest

from quantcore.config import presets
from quantcore.config.task import EvaluationConfig
from quantcore.engine.commands.evaluate import evaluate
from quantcore.engine.commands.speed import Load, speed
from quantcore.events import silence
from tests.support.consumers import HAS_VNNI, NO_AVX512, ROOT, export_all
from tests.support.harness_tasks import write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LOAD = Load(prompt_len=16, num_new=32, repeats=3)


@pytest.mark.parametrize(
    ("runtime", "environment", "preset", "export", "place"),
    [
        ("vllm", "vllm", "int8_dynamic", "compressed_tensors", "compressed_tensors"),
        ("llama_cpp", "llamacpp", "gguf_q8_0", "gguf", "model.gguf"),
    ],
)
def test_a_program_serves_the_files(smollm2, tmp_path, runtime, environment, preset, export, place):
    results, _ = export_all(smollm2, {preset: presets.resolve(preset)}, (export,), tmp_path)
    folder, _ = results[preset]
    model = folder / place if (folder / place).exists() else folder
    python = ROOT / ".venv-consumers" / environment / "bin" / "python"
    report = speed(str(model), None, LOAD, silence, runtime=runtime, python=str(python))
    assert (report["runtime"], report["model"]["prompt_tokens_per_s"] > 1) == (runtime, True)
    assert report["model"]["new_tokens_per_s"] > 0.5
    assert report["model"]["peak_memory_bytes"] > 134e6, "the weights take a byte each"


@pytest.mark.skipif(not HAS_VNNI, reason=NO_AVX512)
def test_tasks_in_vllm_are_those_of_our_engine_but_for_rounding(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    results, _ = export_all(smollm2, {"w4a16": presets.resolve("w4a16")}, ("compressed_tensors",), tmp_path)
    (tmp_path / "tasks").mkdir()
    names = ("tiny_choice", "tiny_rolling")
    wanted = EvaluationConfig(num_windows=2, seq_len=64, tasks=names, include_path=write_tasks(tmp_path / "tasks"))
    python = ROOT / ".venv-consumers" / "vllm" / "bin" / "python"
    model = str(results["w4a16"][0])
    served = evaluate(model, None, wanted, silence, vllm_python=str(python))
    ours = evaluate(model, None, wanted, silence)
    assert served.served_by.keys() == {"vllm", "lm_eval"}
    assert {task: metrics.keys() for task, metrics in served.harness.items()} == {
        task: metrics.keys() for task, metrics in ours.harness.items()
    }
    bits = [report.harness["tiny_rolling"]["bits_per_byte,none"].value for report in (served, ours)]
    assert bits[0] == pytest.approx(bits[1], rel=0.02)
    right = [report.harness["tiny_choice"]["acc,none"].value for report in (served, ours)]
    assert abs(right[0] - right[1]) <= 0.13, "one of eight questions"
