"""What programs that we did not write compute from results of real models, with their own defaults.

SmolLM2 is in test_consumers.py and test_llamacpp.py. Gemma 3 has what it does not: a text begins with a token that the
tokenizer adds, and the cache holds normalized keys. The mixture has experts. ``make test-all`` runs this.
"""

import pytest

from quantcore.config import presets
from tests.support.consumers import HAS_VNNI, NO_AVX512, TOLERANCE, check, export_all, run_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TEXT = "The capital of France is"
BOS = 2


@pytest.fixture(scope="module")
def of_gemma(gemma, tmp_path_factory):
    """Quantize Gemma for vLLM, with an fp8 cache and without."""
    folder = tmp_path_factory.mktemp("gemma")
    configs = {
        "w4a16_sym": presets.resolve("w4a16_sym"),
        "int8_dynamic, fp8 KV cache": presets.resolve("int8_dynamic", kv_cache="fp8"),
    }
    return export_all(gemma, configs, ("compressed_tensors", "quark"), folder)


@pytest.mark.skipif(not HAS_VNNI, reason=NO_AVX512)
def test_gemma_in_vllm(of_gemma, agrees):
    results, windows = of_gemma
    for scheme, (folder, summary) in results.items():
        cache = ["fp8"] if "KV" in scheme else []
        if cache:  # vLLM's loader of Gemma has no place for scales of outputs in quark, so no line for it is printed
            found, printed = run_in("vllm", "check_vllm.py", folder / "quark", windows, *cache)
            assert found is None and "object has no attribute 'data'" in printed
            assert "vLLM" not in summary["exports"]["quark"]["programs"]
        for export in ("compressed_tensors",) if cache else ("compressed_tensors", "quark"):
            found = check("vllm", "check_vllm.py", folder / export, windows, *cache)
            assert found["prompt_ids"][0] == BOS
            ours = summary["perplexity_after"]
            agrees("vLLM (CPU)", export, scheme, found["perplexity"], ours, TOLERANCE, "Gemma 3 270M", "gemma3_text")


@pytest.mark.skipif(not HAS_VNNI, reason=NO_AVX512)
def test_gemma_before_it_was_quantized(of_gemma, gemma):
    """Without the token that begins a text, its perplexity is four times as high."""
    results, windows = of_gemma
    before = check("vllm", "check_vllm.py", gemma, windows)["perplexity"]
    for _, summary in results.values():
        assert before == pytest.approx(summary["perplexity_before"], rel=TOLERANCE)


def test_gemma_in_transformers(of_gemma, agrees):
    results, windows = of_gemma
    folder, summary = results["w4a16_sym"]
    found = check("peers", "check_transformers.py", folder / "compressed_tensors", windows)
    assert found["prompt_ids"][0] == BOS
    agrees(
        "Transformers + compressed-tensors", "compressed_tensors", "w4a16_sym", found["perplexity"],
        summary["perplexity_after"], TOLERANCE, "Gemma 3 270M", "gemma3_text",
    )  # fmt: skip


def test_gemma_in_llama_cpp(gemma, tmp_path, agrees):
    config = {"gguf_q8_0": presets.resolve("gguf_q8_0")}
    results, windows = export_all(gemma, config, ("gguf",), tmp_path)
    folder, summary = results["gguf_q8_0"]
    found = check("llamacpp", "check_llamacpp.py", folder / "model.gguf", windows, TEXT)
    assert found["ids"][0] == BOS
    ours = summary["perplexity_after"]
    agrees("llama.cpp", "gguf", "gguf_q8_0", found["perplexity"], ours, TOLERANCE, "Gemma 3 270M", "gemma3_text")


def test_a_mixture_in_llama_cpp(mixture, tmp_path, agrees):
    config = {"gguf_q8_0": presets.resolve("gguf_q8_0")}
    results, windows = export_all(mixture, config, ("gguf",), tmp_path)
    folder, summary = results["gguf_q8_0"]
    found = check("llamacpp", "check_llamacpp.py", folder / "model.gguf", windows, TEXT)
    ours = summary["perplexity_after"]
    agrees("llama.cpp", "gguf", "gguf_q8_0", found["perplexity"], ours, TOLERANCE, "trained mixture", "qwen3_moe")


def test_a_mixture_in_transformers(mixture, tmp_path, agrees):
    """It reads experts of 4 bits as they were quantized."""
    config = {"w4a16_sym": presets.resolve("w4a16_sym", group_size=32)}
    results, windows = export_all(mixture, config, ("compressed_tensors", "fake_quantized"), tmp_path)
    folder, summary = results["w4a16_sym"]
    assert "Transformers" in summary["exports"]["compressed_tensors"]["programs"]
    for export, program in (
        ("compressed_tensors", "Transformers + compressed-tensors"), ("fake_quantized", "Transformers"),
    ):  # fmt: skip
        found = check("peers", "check_transformers.py", folder / export, windows)
        ours = summary["perplexity_after"]
        agrees(program, export, "w4a16_sym", found["perplexity"], ours, TOLERANCE, "trained mixture", "qwen3_moe")
