"""vLLM on a CPU, and its errors for the layouts of compressed-tensors for which it has no kernel there.

It has kernels for int8, fp8, 4-bit words and, on processors with AMX, blocks of fp8. For NVFP4, MXFP4, MXFP8 and words
of other sizes it has none on any CPU: these tests can only show that it recognizes the scheme in our config.json and
stops at the choice of the kernel. The project's own code shows that the weights are read as meant:
tests/conformance/test_compressed_tensors.py, and through Transformers tests/integration.
"""

from pathlib import Path

import pytest

from quantcore.config import presets
from quantcore.config.quantization import Config, QuantizationConfig, QuantizationSpec
from tests.support.consumers import TOLERANCE, export_all, run_in
from tests.support.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
NO_KERNEL = {
    "nvfp4": "Failed to find a kernel that can implement the NVFP4 linear layer",
    "nvfp4_weight_only": "Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported",
    "mxfp4": "Failed to find a kernel that can implement the MXFP4 linear layer",
    "mxfp4_weight_only": "Failed to find a kernel that can implement the MXFP4 linear layer",
    "mxfp8": "Failed to find a kernel that can implement the MXFP8 linear layer",
    **dict.fromkeys(
        ("int2", "int3", "int8", "uint8"), "Failed to find a kernel that can implement the WNA16 linear layer"
    ),
}


@pytest.fixture(scope="module")
def tiny_exports(tmp_path_factory):
    """Export a model whose weights are whole blocks of 128: each scheme in one format, fp8 blocks in both."""
    folder = tmp_path_factory.mktemp("compressed_tensors")
    model = tiny_model(
        folder / "model", hidden_size=128, intermediate_size=384, head_dim=32, num_key_value_heads=4, rank=8,
        max_position_embeddings=512,
    )  # fmt: skip
    words = {
        name: Config(
            global_quant_config=QuantizationConfig(
                weight=QuantizationSpec(dtype=name, qscheme="per_group", group_size=32)
            ),
            exclude=("lm_head",),
        )
        for name in ("int2", "int3", "int8", "uint8")
    }
    named = {name: presets.resolve(name) for name in NO_KERNEL if name not in words}
    results, _ = export_all(model, words | named, ("compressed_tensors",), folder)
    blocks, windows = export_all(
        model, {"fp8_block": presets.resolve("fp8_block")}, ("compressed_tensors", "fp8"), folder
    )
    return results | blocks, windows


def test_vllm_reads_blocks_of_fp8_from_both_formats(tiny_exports, agrees):
    """vLLM's kernel for processors with AMX leaves inputs in bfloat16; without AMX it reports that it has none."""
    results, windows = tiny_exports
    folder, summary = results["fp8_block"]
    outputs = {}
    for name in ("compressed_tensors", "fp8"):
        outputs[name], printed = run_in("vllm", "check_vllm.py", folder / name, windows)
        if not HAS_AMX:
            assert outputs[name] is None and "requires AMX tile support" in printed
            continue
        assert outputs[name] is not None, printed[-6000:]
        assert outputs[name]["method"] == name.replace("_", "-")
        ours = summary["perplexity_after"]
        agrees("vLLM (CPU)", name, "fp8_block", outputs[name]["perplexity"], ours, TOLERANCE, "tiny llama")
    if HAS_AMX:  # the same codes and scales under two sets of names
        assert outputs["compressed_tensors"]["perplexity"] == outputs["fp8"]["perplexity"]


@pytest.mark.parametrize("name", list(NO_KERNEL))
def test_vllm_knows_the_scheme_but_has_no_kernel_for_it_on_a_cpu(tiny_exports, name):
    results, windows = tiny_exports
    result, printed = run_in("vllm", "check_vllm.py", results[name][0], windows)
    assert result is None and NO_KERNEL[name] in printed, printed[-4000:]
