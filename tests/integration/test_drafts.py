"""Draft heads (multi-token prediction): quantized on request, and how many drafted tokens a model accepts.

Transformers decides: its ``MtpModel`` drafts from the same files, and its speculative decoding runs them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from quantcore.config import presets
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.commands import evaluate
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.pipeline import job
from quantcore.errors import ConfigError
from quantcore.importing.model import read_model
from tests.support.drafts import CONFIGS, NUM_BLOCKS, save_with_draft
from tests.support.models import tiny_model
from tests.support.params import with_rare, with_usual
from tests.support.proofs import proving_here

NUM_WINDOWS, SEQ_LEN = 4, 64


@pytest.fixture(scope="module", params=list(CONFIGS))
def model_dir(request, tmp_path_factory):
    return save_with_draft(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def quantized(model_dir, tmp_path_factory):
    """(folder, report, held-out windows) of the model with its draft in 4 bits."""
    folder = tmp_path_factory.mktemp("quantized") / "out"
    return folder, *quantize(model_dir, folder, group_size=32, drafts="int4")


@pytest.fixture(scope="module")
def mellum(tmp_path_factory):
    return save_with_draft("mellum", tmp_path_factory.mktemp("model") / "mellum")


def quantize(model: Path, output: Path, preset: str = "w4a16", export=("fake_quantized",), **changes: Any) -> Any:
    """Return the report and the held-out windows of a job."""
    config = presets.resolve(preset, **changes)
    task = Task.model_validate(
        {
            "model_dir": str(model), "output_dir": str(output), "config": config.to_dict(), "export": export,
            "gate": "off", "calibration": {"num_samples": 4, "seq_len": SEQ_LEN},
            "evaluation": {"num_windows": NUM_WINDOWS, "seq_len": SEQ_LEN, "num_prompts": 0},
        }
    )  # fmt: skip
    with proving_here():
        job.run(task, lambda event: None)
    return json.loads((output / "report.json").read_text()), job.read_windows(task).held_out_NT


def load(folder):
    """Load a model in Transformers, which then also finds the draft layer of a model with few blocks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{NUM_BLOCKS}\..*", r"^mtp\."]
    return model


@torch.no_grad()
def share_in_transformers(folder, windows_NT):
    """Draft each token from the state before and the token before it: the share that the model would choose, too."""
    model = load(folder)
    draft = MtpModel.from_pretrained(model).eval()
    model.config.use_cache = False
    outputs = model(input_ids=windows_NT, output_hidden_states=True)
    ids_NP, states_NPH = windows_NT[:, 1:], outputs.hidden_states[-1][:, :-1]
    positions_NP = torch.arange(1, windows_NT.shape[1]).expand_as(ids_NP)
    drafted = draft.forward_layer(0, states_NPH, positions_NP, None, input_ids=ids_NP)
    return (model.lm_head(drafted).argmax(-1) == outputs.logits[:, 1:].argmax(-1)).double().mean().item()


def test_as_many_are_accepted_as_in_transformers(model_dir, quantized):
    folder, report, windows_NT = quantized
    measured = report["drafts"]
    shares = [share_in_transformers(each, windows_NT) for each in (model_dir, folder)]
    assert [measured[which]["value"] for which in ("before", "after")] == pytest.approx(shares, abs=1e-9)
    assert 0.1 < shares[0] < 0.95 and measured["before"] != measured["after"]
    inside = [layer["name"] for layer in report["layers"] if is_of_draft(layer["name"])]
    assert measured["num_layers"] == len(inside) and {"o_proj", "down_proj"} <= {name.split(".")[-1] for name in inside}
    assert "layers of draft heads are rounded without calibration" in " ".join(report["warnings"])
    assert "of the drafted tokens" in (folder / "README.md").read_text()
    assert "share of draft tokens accepted by the model" in (folder / "report.html").read_text()


def is_of_draft(name):
    return name.startswith(("mtp.", f"model.layers.{NUM_BLOCKS}."))


@torch.no_grad()
def test_speculative_decoding_in_transformers_runs_the_files(quantized):
    ids_NT = torch.tensor([[72, 101, 108, 108, 111]])
    model = load(quantized[0])
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids_NT, use_mtp=True, **settings), model.generate(ids_NT, **settings))


@pytest.mark.parametrize("model_dir", with_usual(CONFIGS, ["deepseek_v3"]), indirect=True)
def test_they_stay_as_they_are_unless_asked_for(model_dir, tmp_path):
    report, _ = quantize(model_dir, tmp_path / "out", group_size=32)
    before, after = (load_file(folder / "model.safetensors") for folder in (model_dir, tmp_path / "out"))
    drafts = [name for name in before if is_of_draft(name)]
    assert drafts and all(torch.equal(before[name], after[name]) for name in drafts)
    assert report["drafts"]["num_layers"] == 0 and report["drafts"]["before"] != report["drafts"]["after"]


@pytest.mark.parametrize("scheme", with_rare(presets.DRAFT_PRESETS, ["int8", "int4"]))
def test_codes_are_read_back_and_measured_alone(scheme, mellum, tmp_path):
    report, _ = quantize(mellum, tmp_path / "out", group_size=32, drafts=scheme, export=("compressed_tensors",))
    evaluation = EvaluationConfig(num_windows=NUM_WINDOWS, seq_len=SEQ_LEN, num_prompts=0)
    result = evaluate.evaluate(str(tmp_path / "out"), None, evaluation, lambda event: None)
    assert result.drafts.after.value == pytest.approx(report["drafts"]["after"]["value"], abs=0.02)
    assert result.drafts.before is None and result.drafts.num_layers == report["drafts"]["num_layers"] > 0
    model = open_model(read_model(tmp_path / "out"))
    with model.head(), model.draft() as draft:
        rounding = [name for name, module in draft.layers[0].named_modules() if module._forward_pre_hooks]
    assert len(rounding) == (0 if scheme == "int4" else result.drafts.num_layers)


def test_from_file_to_file_the_codes_are_the_same(mellum, tmp_path):
    config = presets.resolve("fp8_dynamic", drafts="fp8").to_dict()
    for name, file2file in (("streamed", False), ("files", True)):
        task = {"model_dir": str(mellum), "output_dir": str(tmp_path / name), "config": config, "gate": "off"}
        settings = {"export": ["compressed_tensors"], "calibration": {"num_samples": 2, "seq_len": SEQ_LEN}}
        evaluation = {"num_windows": 0, "num_prompts": 0}
        with proving_here():
            job.run(
                Task.model_validate(task | settings | {"evaluation": evaluation, "file2file": file2file}),
                lambda event: None,
            )
    streamed, files = (load_file(tmp_path / name / "model.safetensors") for name in ("streamed", "files"))
    codes = [name for name, tensor in streamed.items() if is_of_draft(name) and tensor.dtype == torch.float8_e4m3fn]
    assert len(codes) == 16 and all(
        torch.equal(streamed[name].view(torch.uint8), files[name].view(torch.uint8)) for name in codes
    )


def test_a_draft_that_fails_is_seen(mellum, tmp_path):
    """The halves of eh_proj are exchanged: it takes the state for the token."""
    tensors = load_file(mellum / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.cat(tensors["mtp.fc.weight"].chunk(2, dim=1)[::-1], dim=1).contiguous()
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in mellum.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    (right, _), (wrong, _) = (
        quantize(model, tmp_path / f"of_{model.name}", group_size=32) for model in (mellum, broken)
    )
    assert wrong["drafts"]["before"]["value"] < 0.2 < right["drafts"]["before"]["value"]
    assert wrong["quality"]["before"] == right["quality"]["before"]


def test_a_model_whose_drafts_transformers_cannot_run_is_quantized_with_a_warning(mellum, tmp_path):
    config = json.loads((mellum / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    model = tmp_path / "model"
    model.mkdir()
    for file in mellum.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text(json.dumps(config))
    report, _ = quantize(model, tmp_path / "out", group_size=32, drafts="int4")
    assert "drafts" not in report and "has no code for the draft layers" in " ".join(report["warnings"])
    assert any(is_of_draft(layer["name"]) for layer in report["layers"])


def test_what_cannot_be_is_refused(mellum, tmp_path):
    with pytest.raises(ConfigError) as caught:
        quantize(tiny_model(tmp_path / "llama"), tmp_path / "out", drafts="int8")
    assert caught.value.code == "no_drafts" and caught.value.field.endswith("/draft_quant_config")
    with pytest.raises(ConfigError, match="fp8, int8, int4") as caught:
        presets.resolve("w4a16", drafts="int3")
    assert caught.value.code == "unknown_draft_scheme"
    rotated = presets.resolve("w4a16", group_size=32).to_dict() | {"algo_config": [{"name": "rotation"}]}
    task = {"model_dir": str(mellum), "output_dir": str(tmp_path / "out"), "config": rotated}
    with pytest.raises(ConfigError, match="hidden states that the draft head") as caught:
        job.run(Task.model_validate(task), lambda event: None)
    assert caught.value.code == "cannot_rotate" and not (tmp_path / "out").exists()
