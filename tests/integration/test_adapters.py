"""A job with an adapter writes and measures what it would of the model that PEFT merges, and says what it merged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantcore.checkpoint.adapter import adapter_digest
from quantcore.cli.main import main
from quantcore.config.task import AdapterSource, Task, read_task
from quantcore.engine.blockwise.savepoint import fingerprint
from quantcore.engine.chat.chat import open_chat
from quantcore.engine.evaluation.provenance import model_identity
from quantcore.engine.pipeline.job import run
from quantcore.engine.pipeline.reproduce import script
from quantcore.errors import ConfigError, ModelError
from quantcore.events import silence
from tests.support.adapters import save_adapter, without_warnings
from tests.support.jobs import task
from tests.support.models import tiny_model, tiny_tokenizer
from tests.support.proofs import proving_here


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(base, tmp_path_factory.mktemp("saved") / "style", use_dora=True, target_modules="all-linear")


@pytest.fixture(scope="module")
def merged(base: Path, adapter: Path) -> Path:
    """The folder that PEFT's own merge writes."""
    folder = adapter.with_name("merged")
    with without_warnings():
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def report_of(job: Task) -> dict[str, Any]:
    with proving_here():
        report = run(job, silence)
    assert report is not None
    return report.to_dict()


@pytest.mark.parametrize("file2file", [False, True])
def test_the_result_is_that_of_the_merged_model(
    base: Path, adapter: Path, merged: Path, tmp_path: Path, file2file: bool
) -> None:
    preset = "int8_weight_only" if file2file else "w4a16"
    of_adapter = AdapterSource(folder=adapter)
    settings: dict[str, Any] = {"preset": preset, "file2file": file2file, "num_prompts": 2}
    ours = report_of(task(base, tmp_path / "ours", adapter=of_adapter, **settings))
    theirs = report_of(task(merged, tmp_path / "theirs", **settings))
    weights = [load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs")]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    for part in ("quality", "samples"):
        assert ours.get(part) == theirs.get(part), "the original is the merged model in both"
    assert (ours["samples"] is None) == file2file
    digest = adapter_digest(adapter)
    assert ours["model"]["adapter"] == {
        "path": str(adapter), "digest": digest, "method": "DoRA", "rank": 4, "num_tensors": 21, "base_model": str(base),
    }  # fmt: skip
    assert ours["provenance"]["model"].endswith(f"+adapter:{digest}")
    card = (tmp_path / "ours/README.md").read_text()
    assert f"The adapter `style` (DoRA of rank 4, `{digest}`) was merged into it first" in card
    assert digest in (tmp_path / "ours/report.html").read_text()
    assert json.loads((tmp_path / "ours/report.json").read_text()) == json.loads(json.dumps(ours))


def test_the_command_takes_a_folder(base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["quantize", str(base), "int8_weight_only", "-o", str(tmp_path / "out"), "--file2file_quantization"]
    assert main([*command, "--adapter", str(adapter)]) == 0
    assert json.loads((tmp_path / "out/report.json").read_text())["model"]["adapter"]["path"] == str(adapter)
    capsys.readouterr()
    assert main([*command[:-2], str(tmp_path / "no"), "--adapter", str(tmp_path / "nowhere")]) == 1
    assert "There is no adapter at" in capsys.readouterr().err
    assert main([*command[:-2], str(tmp_path / "no"), "--adapter_revision", "main"]) == 1
    assert "--adapter_revision applies only to an adapter on the Hub" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_the_adapter_is_a_part_of_every_identity(base: Path, adapter: Path, tmp_path: Path) -> None:
    job = task(base, tmp_path / "out")
    first, second = (
        job.model_copy(update={"adapter": AdapterSource(folder=adapter, digest=digest)}) for digest in ("a", "b")
    )
    assert len({model_identity(each) for each in (job, first, second)}) == 3
    assert len({fingerprint(each) for each in (job, first, second)}) == 3
    moved = first.model_copy(update={"adapter": AdapterSource(folder=tmp_path, digest="a")})
    assert fingerprint(moved) == fingerprint(first), "the place of the files decides nothing"


def test_another_adapter_in_its_place_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    source = AdapterSource(folder=shutil.copytree(adapter, tmp_path / "style"), digest=adapter_digest(adapter))
    job = task(base, tmp_path / "out", adapter=source)
    settings = json.loads((tmp_path / "style/adapter_config.json").read_text())
    (tmp_path / "style/adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 1}))
    with pytest.raises(ModelError) as caught:
        run(job, silence)
    assert caught.value.code == "adapter_changed"


def test_the_script_names_the_adapter_by_its_digest(base: Path, adapter: Path, tmp_path: Path) -> None:
    source = AdapterSource(folder=adapter, digest="sha256:1")
    text = script(task(base, tmp_path / "out", adapter=source), tmp_path)
    assert f'[ -n "${{ADAPTER_DIR:-}}" ] || ADAPTER_DIR={adapter}\n' in text
    assert '"adapter":{"id":"","revision":"","digest":"sha256:1"}' in text
    on_hub = script(task(base, tmp_path / "out", adapter=AdapterSource(id="org/style", revision="0" * 40)), tmp_path)
    assert "\nADAPTER_DIR=\n" in on_hub


def test_a_goal_with_an_adapter_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "task.json"
    file.write_text(
        json.dumps({
            "model_dir": str(base), "output_dir": str(tmp_path / "out"), "config": {"global_quant_config": {}},
            "goal": {"runtime": "vllm", "device": "24GB"}, "adapter": {"folder": str(adapter)},
        })
    )  # fmt: skip
    with pytest.raises(ConfigError, match="a goal is searched for without an adapter"):
        read_task(file)


def test_a_chat_compares_with_the_merged_model(base: Path, adapter: Path, merged: Path) -> None:
    with open_chat(merged, base, 4, adapter) as chat:
        *_, turn = chat.say("The")
    assert turn.first_difference is None
    with open_chat(merged, base, 4) as chat:
        *_, turn = chat.say("The")
    assert turn.first_difference is not None, "the base model answers otherwise"
