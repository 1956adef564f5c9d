"""The engine on the simulated accelerator: it never mixes devices, and writes what it writes on the CPU.

Codes and scales are equal bit for bit: the arithmetic is the same (see ``accelerator_jobs``), and so must be what is
computed where. Logits of the probes agree within the rounding of float32 products.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore import ModelQuantizer
from quantcore.cli.explain import explained
from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.algorithms import AutoRoundConfig
from quantcore.config.quantization import parse_config
from quantcore.engine.pipeline import job
from quantcore.errors import QuantError
from tests.support.accelerator import on_accelerator
from tests.support.accelerator_jobs import CHAINS, as_on_accelerators, on_both, proofs_in_forks, task
from tests.support.forks import config, task_file
from tests.support.models import MIXTURES, SHAPE, tiny_model
from tests.support.params import with_usual

JOBS = [
    ("w4a16", "rounded"),
    ("w4a16", "gptq"),
    ("w4a16", "awq"),
    ("w4a16", "autoround"),
    ("int8_weight_only", "rtn"),
    ("w4a16", "qronos"),
    ("int8_static", "gptq bias_correction"),
    ("int8_dynamic", "smoothquant gptq"),
    ("int8_static", "autosmoothquant"),
    ("fp8", "gptaq"),
    ("mxfp4", "rotation gptq"),
    ("mxfp4", "gptaq"),
    ("nvfp4", "gptq"),
]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 3}
"""Wide enough for groups of every preset."""
MIXTURE = {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}


def assert_same(job_task):
    (tensors, logits), (others, other_logits) = on_both(job_task)
    assert tensors.keys() == others.keys() and len(tensors) > 20
    assert [name for name, one in tensors.items() if not torch.equal(one, others[name])] == []
    assert (logits - other_logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize(("preset", "chain"), with_usual(JOBS, [("w4a16", "gptq")]))
def test_codes_are_those_of_the_cpu(tmp_path, monkeypatch, preset, chain):
    """Without gradients, which are only nearly those of the CPU, autoround tunes the codes of gptaq."""
    monkeypatch.setattr(AutoRoundConfig, "needs_backward", False)
    num_blocks = 1 if (preset, chain) == ("w4a16", "gptq") else 3
    model = tiny_model(tmp_path / "model", dtype=torch.float32, num_hidden_layers=num_blocks)
    assert_same(task(model, tmp_path / "out", preset, chain))


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["yaqa", "autoround", "gptq distill"])
def test_gradients_are_nearly_those_of_the_cpu(tmp_path, chain):
    """Gradients are sums in another order: scales differ in their last bits, and codes where they are nearly tied.

    Behind such a code the ranges of all later groups of its output can be others, too: the first one counts. Later
    blocks read what the first one computes, so only that one is compared.
    """
    model = tiny_model(tmp_path / "model", dtype=torch.float32)
    (tensors, _), (others, _) = on_both(task(model, tmp_path / "out", "w4a16", chain))
    names = [name for name in tensors if name.startswith("model.layers.0.") and "norm" not in name]
    assert tensors.keys() == others.keys() and len(names) == 21
    for name in names:
        one, other = tensors[name], others[name]
        if one.is_floating_point():
            differs_GO = (one - other).abs() > 1e-2 * one.abs().max()
            assert differs_GO.any(0).sum() <= 0.01 * differs_GO.numel(), name
        else:
            assert (one != other).double().mean() <= 0.1, name


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_preset_is_that_of_the_cpu(tmp_path, preset):
    """As values that were rounded, which a file can hold of every preset."""
    model = tiny_model(tmp_path / "model", dtype=torch.float32, **WIDE)
    assert_same(task(model, tmp_path / "out", preset, "rtn").model_copy(update={"export": ("fake_quantized",)}))


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "chain"), [("w4a16", "gptq"), ("int8_dynamic", "awq"), ("fp8", "rounded")])
def test_codes_of_mixtures_are_those_of_the_cpu(tmp_path, preset, chain):
    model = tiny_model(tmp_path / "model", dtype=torch.float32, **MIXTURE)
    assert_same(task(model, tmp_path / "out", preset, chain))


@pytest.mark.slow
def test_a_job_of_bfloat16_is_proven_in_a_child_process(tmp_path):
    """By the command itself, on the device in both processes: the files give the logits of the model in memory."""
    model = tiny_model(tmp_path / "model")
    file = task_file(model, tmp_path / "out", config("w4a16", {"name": "gptq"}), ("quark",))

    def work(counts):
        with as_on_accelerators(), proofs_in_forks():
            status = main(["run", str(file)])
        return status, counts.launches.total()

    status, launches = on_accelerator(work)
    assert status == 0 and launches > 1000
    assert (tmp_path / "out" / "report.json").exists()


def quantize_in_memory(device, chain):
    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape), dtype=torch.float32).to(device)
    given = presets.resolve("w4a16", group_size=32).to_dict() | {"algo_config": CHAINS[chain]}
    ids_NT = torch.arange(3, 67)[None].to(device)
    with as_on_accelerators():
        ModelQuantizer(parse_config(given)).quantize_model(model.train(False), [ids_NT])
        with torch.no_grad():
            return model(ids_NT).logits.cpu()


@pytest.mark.parametrize("chain", with_usual(["gptq", "awq", "smoothquant gptq", "rotation gptq"], ["gptq"]))
def test_models_in_memory_stay_on_their_device(chain):
    expected, found = quantize_in_memory("cpu", chain), on_accelerator(lambda _: quantize_in_memory("sim", chain))
    assert (expected - found).abs().max() <= 1e-5 * expected.abs().max()


def test_running_out_of_memory_is_said(tmp_path):
    model = tiny_model(tmp_path / "model", dtype=torch.float32, num_hidden_layers=1)

    def work(counts):
        with pytest.raises(QuantError) as caught, explained(lambda event: None) as emit:
            job.run(task(model, tmp_path / "out", "w4a16", "rounded"), emit)
        return caught.value.code, counts.peak_bytes

    code, peak_bytes = on_accelerator(work, memory_bytes=200_000)
    assert code == "out_of_memory" and peak_bytes <= 200_000
    assert not (tmp_path / "out").exists()
