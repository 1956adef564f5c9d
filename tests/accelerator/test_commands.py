"""More of the engine on the simulated accelerator: from file to file, mixing, evaluating, going on, several ranks.

As in ``test_engine``, codes are equal bit for bit, and measured numbers agree within the rounding of float32 sums.
"""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from safetensors.torch import load_file

from quantcore.cli.main import main
from quantcore.config.task import EvaluationConfig
from quantcore.engine.blockwise import savepoint
from quantcore.engine.commands.evaluate import evaluate
from quantcore.engine.pipeline.job import run
from quantcore.engine.pipeline.writer import ResultWriter
from quantcore.engine.runtime import sharded, weight_loader
from quantcore.engine.runtime.shards import is_sharded, local_rows
from quantcore.events import silence
from tests.support.accelerator import SimTensor, accelerator, on_accelerator
from tests.support.accelerator_jobs import as_on_accelerators, proofs_in_forks, quantized, task
from tests.support.forks import config, forked, killed, task_file
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_usual

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
"""The K-quants of GGUF have super-blocks of 256 inputs."""
MIXTURE = {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}


def differing(one, other):
    assert one.keys() == other.keys() and len(one) > 20
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def written(folder):
    return {name: tensor for file in folder.rglob("*.safetensors") for name, tensor in load_file(file).items()}


EXPORTS = [
    ("w4a16", "quark"),
    ("w4a16", "gptq_v2"),
    ("w4a16", "awq"),
    ("w4a16_sym", "compressed_tensors"),
    ("nvfp4", "compressed_tensors"),
    ("mxfp4", "quark"),
    ("int8_dynamic", "compressed_tensors"),
    ("fp8_block", "fp8"),
    ("fp8", "quark"),
    ("nf4", "bitsandbytes"),
    ("gguf_q4_k", "gguf"),
    ("gguf_q8_0", "gguf"),
    ("int8_weight_only", "onnx"),
]


@pytest.mark.parametrize(("preset", "export"), with_usual(EXPORTS, [("w4a16", "gptq_v2")]))
def test_files_are_decoded_on_the_device_for_the_proof(tmp_path, preset, export):
    model = tiny_model(tmp_path / "model", dtype=torch.float32, **WIDE)
    job = task(model, tmp_path / "out", preset, "rounded").model_copy(update={"export": (export,)})

    def work(_):
        with as_on_accelerators(), proofs_in_forks():
            return run(job, silence)

    report = on_accelerator(work)
    assert report is not None and (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize("preset", with_usual(["w4a16", "fp8_dynamic", "nvfp4_weight_only", "mxfp4"], ["w4a16"]))
def test_from_file_to_file(tmp_path, preset):
    model = tiny_model(tmp_path / "model", dtype=torch.float32)
    evaluation = EvaluationConfig(num_windows=0, num_prompts=0)
    job = task(model, tmp_path / "out", preset, "rounded").model_copy(
        update={"file2file": True, "evaluation": evaluation}
    )
    expected, _ = quantized(job)
    (found, _), launches = on_accelerator(lambda counts: (quantized(job), counts.launches.total()))
    assert differing(expected, found) == [] and launches > 100


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, MIXTURE], ids=["dense", "mixture"])
def test_mixing(tmp_path, shape):
    """Each unit gets the scheme that it gets on the CPU."""
    model = tiny_model(tmp_path / "model", dtype=torch.float32, rank=8, **shape)
    flags = ["--max_bits", "6", "--num_calib_data", "4", "--seq_len", "32", "--json"]

    def work():
        with as_on_accelerators(), redirect_stdout(StringIO()) as out:
            assert main(["mix", str(model), "--schemes", "mxfp4_weight_only", "int8_weight_only", *flags]) == 0
        return json.loads(out.getvalue())

    expected, found = work(), on_accelerator(lambda _: work())
    assert found["config"] == expected["config"]
    assert found["mix"]["loss"] == pytest.approx(expected["mix"]["loss"], rel=1e-3)


@pytest.mark.slow
def test_evaluating(tmp_path):
    model = tiny_model(tmp_path / "model", dtype=torch.float32, rank=8)
    file = task_file(model, tmp_path / "out", config("w4a16"), ("quark",))
    asked = EvaluationConfig(num_windows=3, seq_len=64, num_prompts=1)

    def work():
        with as_on_accelerators():
            return evaluate(str(tmp_path / "out"), str(model), asked, silence)

    with as_on_accelerators():
        assert main(["run", str(file)]) == 0
    expected, found = work(), on_accelerator(lambda _: work())
    for name in ("kl_mean", "top1_agreement"):
        one, other = (getattr(result.quality.divergence, name).value for result in (expected, found))
        assert other == pytest.approx(one, rel=1e-4, abs=1e-7)
    assert found.quality.after.token_perplexity.value == pytest.approx(
        expected.quality.after.token_perplexity.value, rel=1e-5
    )
    assert found.samples == expected.samples


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["gptq", "gptaq"])
def test_a_job_that_was_killed_goes_on(tmp_path, monkeypatch, chain):
    """Its states come back from the disk to the device."""
    monkeypatch.setattr(savepoint, "MIN_WORK_PER_SAVE", 0)  # after every block
    model = tiny_model(tmp_path / "model", dtype=torch.float32)
    job = task(model, tmp_path / "out", "w4a16", chain)
    expected, logits = quantized(job)
    job = job.model_copy(update={"resume_dir": tmp_path / "resume"})

    def stopped(_):
        monkeypatch.setattr(ResultWriter, "tell", killed(ResultWriter, "tell", 3))
        quantized(job)

    with pytest.raises(EOFError):  # the fork is dead
        on_accelerator(stopped)
    assert (tmp_path / "resume").exists() and not (tmp_path / "out").exists()
    found, other_logits = on_accelerator(lambda _: quantized(job))
    assert differing(expected, found) == []
    assert (logits - other_logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "preset", "chain", "shape"),
    [
        (2, "w4a16", [{"name": "gptq"}], {}),
        (2, "mxfp4", [{"name": "rotation"}, {"name": "gptaq"}], {}),
        (2, "fp8", [{"name": "gptq"}], MIXTURE),
        (4, "w4a16", [{"name": "gptq"}], {}),
        (4, "w4a16", [{"name": "yaqa"}], {}),
    ],
    ids=["2 w4a16 gptq", "2 mxfp4 rotation gptaq", "2 fp8 gptq, mixture", "4 w4a16 gptq", "4 w4a16 yaqa"],
)
def test_ranks_with_a_device_each(tmp_path, num_ranks, preset, chain, shape):
    """They write what one writes with its device."""
    run_with_devices(tmp_path, num_ranks, preset, chain, shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "preset", "chain", "shape"),
    [
        (2, "w4a16", [{"name": "gptq"}], {}),
        (3, "mxfp4", [{"name": "rotation"}, {"name": "gptaq"}], {}),
        (2, "int8_dynamic", [{"name": "smoothquant"}, {"name": "awq"}], {"attention_bias": True}),
        (2, "fp8", [{"name": "gptq"}], MIXTURE),
    ],
    ids=["2 w4a16 gptq", "3 mxfp4 rotation gptaq", "2 int8_dynamic smoothquant awq", "2 fp8 gptq, mixture"],
)
def test_ranks_with_a_shard_of_each_block_on_their_devices(tmp_path, monkeypatch, num_ranks, preset, chain, shape):
    """FSDP2 gathers each layer on the device; a rank holds its rows of it, and all write what one writes."""

    def shard_on_device(block, ranks, device, keeps, shard=sharded.shard):
        shard(block, ranks, device, keeps)
        rows = {name: local_rows(one) for name, one in block.named_parameters() if is_sharded(one)}
        assert len(rows) >= 4 and all(isinstance(one, SimTensor) for one in rows.values())
        wholes = {name: len(one) for name, one in block.named_parameters()}
        assert all(len(one) <= -(-wholes[name] // num_ranks) for name, one in rows.items())

    monkeypatch.setattr(weight_loader, "shard", shard_on_device)
    run_with_devices(tmp_path, num_ranks, preset, chain, shape, shard_blocks=True)


def run_with_devices(tmp_path, num_ranks, preset, chain, shape, **more):
    """Run a job on ranks with a device each, and the same on one; compare what they write."""
    model = tiny_model(tmp_path / "model", dtype=torch.float32, **shape)
    given = config(preset, *chain)
    alone, shared = (
        task_file(model, tmp_path / name, given, ("quark",), **options)
        for name, options in {"alone": {}, "shared": more}.items()
    )

    def with_a_device(file):
        with accelerator() as counts, as_on_accelerators(), proofs_in_forks():
            return main(["run", str(file)]) or 100 * (counts.launches.total() < 1000)

    assert forked(lambda _: with_a_device(alone), 1, tmp_path) == [0], (tmp_path / "err.0").read_text()
    statuses = forked(lambda _: with_a_device(shared), num_ranks, tmp_path)
    assert statuses == [0] * num_ranks, "".join(
        (tmp_path / f"{name}.{rank}").read_text() for rank in range(num_ranks) for name in ("out", "err")
    )
    assert differing(written(tmp_path / "alone"), written(tmp_path / "shared")) == []
    assert len(json.loads((tmp_path / "shared" / "report.json").read_text())["summary"]["ranks"]) == num_ranks
