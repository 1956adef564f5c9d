"""Caches of fewer bits as llama.cpp and vLLM keep them, beside what ``evaluate --kv_cache_dtypes`` takes them for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantcore.config import presets
from quantcore.config.cache_dtypes import CACHE_DTYPES, cache_dtypes
from quantcore.config.task import EvaluationConfig
from quantcore.engine.commands.evaluate import evaluate
from quantcore.engine.evaluation.cache_rounding import stored
from quantcore.events import silence
from tests.support.consumers import export_all, run_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EVALUATION = EvaluationConfig(num_windows=2, seq_len=256)


def test_llama_cpp_loses_as_much_with_each_of_its_caches(smollm2, tmp_path):
    """Queries are rounded to Q8_0 beside a quantized cache, and activations everywhere: they add up to 0.006 nats."""
    results, _ = export_all(smollm2, {"one": presets.resolve("gguf_q8_0")}, ("gguf",), tmp_path)
    folder = results["one"][0]
    dtypes = cache_dtypes(["llama_cpp"])
    ours = evaluate(str(folder), None, EVALUATION, silence, cache_dtypes=dtypes).kv_caches
    windows = tmp_path / "windows.json"
    windows.write_text(json.dumps(held_out(smollm2)))
    names = [dtype.name for dtype in dtypes]
    theirs, output = run_in("llamacpp", "check_llamacpp_caches.py", folder / "model.gguf", windows, *names)
    assert theirs is not None, output
    for each in ours:
        expected = each.quality.divergence.kl_mean.value
        assert theirs[each.dtype] == pytest.approx(expected, rel=0.25, abs=0.006), each.dtype
    assert theirs["q4_0"] > 3 * theirs["q8_0"], "the divergences are those of the caches"


def held_out(folder):
    from quantcore.engine.evaluation.inputs import held_out_text

    return held_out_text(folder, EVALUATION).ids_NT.tolist()


@pytest.mark.parametrize("size", [64, 96, 128])
def test_vllm_s_kernels_keep_the_same_values(tmp_path, size):
    generator = torch.Generator().manual_seed(size)
    keys_THD = (torch.randn(6, 2, size, generator=generator) * 3).bfloat16()
    keys_THD[0, 0] = 0
    save_file({"keys": keys_THD}, tmp_path / "keys.safetensors")
    done, output = run_in(
        "vllm", "check_cache_dtypes.py", tmp_path / "keys.safetensors", tmp_path / "stored.safetensors"
    )
    assert done is not None, output
    found = load_file(tmp_path / "stored.safetensors")
    assert len(found) == (3 if size == 96 else 10)
    for case, theirs_THD in found.items():
        name, _, part = case.partition(" ")
        # int4 rounds to the model's dtype after its rotation, which the other way round is no rounding
        keys_BHTD = keys_THD.transpose(0, 1)[None]
        given_BHTD = keys_BHTD if name.startswith("int4") else keys_BHTD.float()
        ours_THD = stored(given_BHTD, CACHE_DTYPES[name], are_keys=part != "values")[0].transpose(0, 1).float()
        if part:  # vLLM gives these back in float16
            torch.testing.assert_close(ours_THD, theirs_THD, rtol=2e-3, atol=4e-3, msg=case)
        elif name.startswith("int4"):
            torch.testing.assert_close(ours_THD, theirs_THD.bfloat16().float(), rtol=0.01, atol=1e-4)
        else:
            assert torch.equal(ours_THD, theirs_THD), name
