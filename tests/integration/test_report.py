"""What travels with an artifact: the report keeps to its schema, the page asks nobody, the script works."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
import torch
from huggingface_hub import metadata_load

from quantcore.cli import console
from quantcore.config.algorithms import GPTQConfig
from quantcore.config.presets import resolve
from quantcore.config.task import EvaluationConfig
from quantcore.config.texts import CalibrationConfig
from quantcore.engine.pipeline.job import run
from quantcore.report.card import code, escape
from quantcore.report.html import page
from quantcore.report.values import Report
from tests.support.grids import on_grids
from tests.support.jobs import BOTH, task
from tests.support.models import tiny_model
from tests.support.proofs import proving_here

ROOT = Path(__file__).parents[2]
CARD = """---
license: apache-2.0
language: [en]
base_model: org/float
tags: [chat, "<b>", 7]
model-index: [{name: x}]
---
# A model
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """(folder, report) of a model whose name is no harmless one."""
    model_dir = tiny_model(tmp_path_factory.mktemp("tiny") / "<b>my 'model'</b>", rank=8)
    (model_dir / "README.md").write_text(CARD)
    folder = tmp_path_factory.mktemp("out") / "out"
    with proving_here():
        return folder, run(task(model_dir, folder, "w4a16", BOTH, num_prompts=4), lambda event: None).to_dict()


@pytest.fixture(scope="module")
def schema():
    return json.loads((ROOT / "docs/report.schema.json").read_text())


def test_the_report_keeps_to_its_schema(artifact, schema):
    report = json.loads((artifact[0] / "report.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(report, schema)
    for spoil in (lambda one: one.pop("quality"), lambda one: one["summary"].update(gate="maybe")):
        broken = json.loads(json.dumps(report))
        spoil(broken)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_the_seconds_of_all_phases_are_those_of_the_job(artifact):
    summary = artifact[1]["summary"]
    seconds = summary["seconds_by_phase"]
    assert list(seconds) == ["resolve", "plan", "quantize", "export", "verify"]
    assert sum(seconds.values()) == pytest.approx(summary["total_s"], rel=0.05)
    assert f"verify {seconds['verify']:.1f} s" in (artifact[0] / "report.html").read_text()


def test_the_worst_layer_is_the_one_whose_output_changed_most(artifact, tmp_path, capsys, proof_in_this_process):
    """By its weight's error it was another one: 208th of 210 by the output in a real model."""
    folder = tmp_path / "out"
    config = replace(resolve("w4a16", group_size=32), algo_config=(GPTQConfig(),))
    model_dir = Path(artifact[1]["model"]["path"])
    report = run(task(model_dir, folder, config=config), lambda event: None).to_dict()
    by_output = max(report["layers"], key=lambda layer: layer["output_error"])
    assert by_output["name"] != max(report["layers"], key=lambda layer: layer["relative_error"])["name"]
    worst = report["summary"]["worst_layer"]
    assert worst == {name: by_output[name] for name in ("name", "relative_error", "sqnr_db", "output_error")}
    text = f"{worst['name']} (relative error {worst['output_error']:.4f} of its output"
    assert text in (folder / "report.html").read_text()
    console.show_report(Report.model_validate(report), "out")
    assert "worst layer" in (shown := capsys.readouterr().out) and worst["name"].rpartition(".")[2] in shown


def test_without_a_look_at_outputs_the_largest_weight_error_is_called_that(artifact, tmp_path, proof_in_this_process):
    model_dir = Path(artifact[1]["model"]["path"])
    report = run(task(model_dir, tmp_path / "out", "int8_weight_only", num_prompts=0), lambda event: None)
    worst = max(report.layers, key=lambda layer: layer.relative_error)
    assert (report.summary.worst_layer.name, report.summary.worst_layer.output_error) == (worst.name, None)
    assert report.summary.worst_layer.title == "largest weight error"
    assert "Largest weight error" in (tmp_path / "out/report.html").read_text()


def test_without_an_evaluation_it_does_too(artifact, schema, tmp_path, proof_in_this_process):
    given = task(Path(artifact[1]["model"]["path"]), tmp_path / "out", "int8_static")
    report = run(given.model_copy(update={"evaluation": EvaluationConfig(num_windows=0)}), lambda event: None).to_dict()
    jsonschema.validate(json.loads(json.dumps(report)), schema)
    assert report["quality"] is None and "No evaluation" in (tmp_path / "out" / "report.html").read_text()
    [most_clipped] = [row["value"] for row in report["summary"]["gates"] if row["name"] == "clipping"]
    assert "q_proj input" in report["clipping"] and 0 <= max(report["clipping"].values()) <= most_clipped
    assert "clipping" not in artifact[1]  # of weights alone
    assert "grids" not in artifact[1]["model"]


def test_a_model_that_was_quantized_before_is_called_that(schema, tmp_path, proof_in_this_process):
    model_dir = on_grids(tiny_model(tmp_path / "model"), {"_proj": "gguf_q5_1"})
    folder = tmp_path / "out"
    report = run(task(model_dir, folder, "int8_weight_only", num_prompts=0), lambda event: None).to_dict()
    jsonschema.validate(json.loads(json.dumps(report)), schema)
    [grid] = report["model"]["grids"]
    assert grid["title"] == "Q5_1, groups of 32" and grid["share"] == 1
    assert any("not the float model" in warning for warning in report["warnings"])
    assert "Weights of the input model" in (page := (folder / "report.html").read_text())
    assert "Q5_1, groups of 32 (100 %)" in page
    assert "already quantized: Q5\\_1, groups of 32 \\(100 %\\)" in (folder / "README.md").read_text()


def test_the_distance_by_position_is_that_of_all_scored_tokens(artifact):
    quality = artifact[1]["quality"]
    ranges = quality["by_position"]
    assert [one["first"] for one in ranges] == [1, 17] and ranges[-1]["last"] == quality["seq_len"] - 1
    assert sum(one["num_tokens"] for one in ranges) == quality["num_tokens"]
    for name in ("kl_mean", "top1_agreement"):
        mean = sum(one[name]["value"] * one["num_tokens"] for one in ranges) / quality["num_tokens"]
        assert mean == pytest.approx(quality["divergence"][name]["value"], rel=1e-9)
    assert "17 to 63" in (artifact[0] / "report.html").read_text()


def test_every_source_is_named_with_its_windows(artifact, tmp_path, proof_in_this_process):
    file = tmp_path / "words.txt"
    file.write_text("one two three " * 2000)
    sources = [{"source": "builtin", "share": 3}, {"source": str(file)}]
    given = task(Path(artifact[1]["model"]["path"]), tmp_path / "out", "int8_static")
    calibration = CalibrationConfig(sources=sources, num_samples=4, seq_len=32)
    report = run(given.model_copy(update={"calibration": calibration}), lambda event: None)
    assert [(one["source"], one["num_samples"]) for one in report.calibration["sources"]] == [
        ("builtin", 3), (str(file), 1),
    ]  # fmt: skip
    assert str(file) in (tmp_path / "out" / "report.html").read_text()


def test_arguments_reach_the_template_of_the_model(tmp_path, proof_in_this_process):
    """And one that it never reads is said once. The text is long enough only with what the argument adds."""
    model_dir = tiny_model(tmp_path / "model")
    template = "{% for one in messages %}{{ one.content * (99 if thinking else 1) }} {% endfor %}"
    (model_dir / "chat_template.jinja").write_text(template)
    file = tmp_path / "chats.jsonl"
    file.write_text((json.dumps({"messages": [{"role": "user", "content": "one two "}]}) + "\n") * 8)
    arguments = {"thinking": True, "enable_thinking": False}
    text = {"source": str(file), "chat_template_kwargs": arguments}
    given = task(model_dir, tmp_path / "out", "int8_static").model_copy(update={
        "calibration": CalibrationConfig(**text, num_samples=2, seq_len=64),
        "evaluation": EvaluationConfig(**text, num_windows=2, seq_len=64),
    })  # fmt: skip
    report = run(given, lambda event: None)
    assert report.calibration["chat_template_kwargs"] == arguments
    assert sum("never reads enable_thinking" in warning for warning in report.warnings) == 1


def test_text_of_another_kind_than_the_model_is_for_is_warned_about(tmp_path, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "a-coder")
    (model_dir / "chat_template.jinja").write_text(
        "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    )
    file = tmp_path / "words.txt"
    file.write_text("one two three " * 2000)
    calibration = CalibrationConfig(source=str(file), num_samples=2, seq_len=32)
    given = task(model_dir, tmp_path / "out", "int8_static").model_copy(update={"calibration": calibration})
    warnings = " ".join(run(given, lambda event: None).warnings)
    assert warnings.count("contains no chats ('<user>'") == warnings.count("contains no code") == 1


class Page(HTMLParser):
    """Counts the tags, and sees that they close in order."""

    VOID = ("meta",)

    def __init__(self, text):
        super().__init__()
        self.open, self.count, self.attributes, self.text = [], {}, [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_and_asks_nobody(artifact):
    folder, report = artifact
    text = (folder / "report.html").read_text()
    found = Page(text)
    assert found.open == [] and not {"script", "link", "img", "iframe", "b>my"} & found.count.keys()
    assert not [name for name, _ in found.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import", text.replace("http-equiv", ""))
    assert "default-src 'none'" in text and "prefers-color-scheme:dark" in text
    assert found.count["circle"] == found.count["title"] - 1 == len(report["layers"])
    rows = text.partition("Show as table")[2].partition("</table>")[0].count("<tr>")
    assert rows == len(report["layers"]) + 1
    assert "<b>my 'model'</b>" in found.text, "escaped, it is text"
    for row in report["summary"]["gates"]:
        assert row["name"] in found.text


def test_whatever_a_report_holds_is_text_on_the_page(artifact):
    evil = "</pre></details><script>alert(1)</script>"
    report = json.loads(json.dumps(artifact[1]))
    report["warnings"].append(evil)
    report["config"]["x"] = evil
    report["layers"][0]["name"] = f'"{evil}'
    report["samples"][0]["quantized"] = evil
    found = Page(page(Report.model_validate(report)))
    assert found.open == [] and "script" not in found.count and found.text.count("alert(1)") >= 4


def test_the_card_says_what_the_source_says_and_what_was_measured(artifact):
    folder, report = artifact
    front, text = metadata_load(folder / "README.md"), (folder / "README.md").read_text()
    assert (front["license"], front["base_model"], front["language"]) == ("apache-2.0", ["org/float"], ["en"])
    assert {"chat", "quantized", *BOTH} <= set(front["tags"]) and "model-index" not in front
    assert f"{report['summary']['perplexity_after']:.5g}" in text
    for export in report["summary"]["exports"].values():
        assert export["load"] in text
    assert "<b>" not in text.partition("\n---\n")[2].replace("`<b>my 'model'</b>`", "")
    assert str(Path(report["model"]["path"]).parent) not in text, "where it lay is nobody's business"


@pytest.mark.parametrize("card", ["", "---\n{[", "---\n- a\n---\n", "---\nlicense: [1, {}]\ntags: 7\n---\n"])
def test_a_card_that_cannot_be_read_costs_no_job(artifact, card, tmp_path):
    from quantcore.report.card import model_card

    (tmp_path / "README.md").write_text(card)
    assert "## Loading" in model_card(Report.model_validate(artifact[1]), tmp_path)


def test_text_in_markdown_is_text():
    assert escape("a|b <i>*x*</i>\n") == r"a\|b \<i\>\*x\*\</i\> "
    assert code("a`b|") == "`` a`b¦ ``" and code("x") == "`x`"


@pytest.mark.slow
def test_the_script_makes_the_same_bytes(artifact, tmp_path):
    folder, _ = artifact
    done = subprocess.run(
        ["sh", folder / "reproduce.sh", tmp_path / "again"], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": OK") == 2
    for export in BOTH:
        files = [one / export / "model.safetensors" for one in (folder, tmp_path / "again")]
        assert files[0].read_bytes() == files[1].read_bytes()
    script = (folder / "reproduce.sh").read_text()
    (tmp_path / "other.sh").write_text(re.sub(r"\n[0-9a-f]{64}  quark", "\n" + "0" * 64 + "  quark", script))
    other = subprocess.run(  # of the same files, not made once more
        ["sh", tmp_path / "other.sh", tmp_path / "again"], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHON": "true"},
    )  # fmt: skip
    assert other.returncode != 0 and "quark/model.safetensors: FAILED" in other.stdout
    assert f"threads {torch.get_num_threads()}" in other.stderr and "sums in another order" in other.stderr


def test_the_script_and_the_report_say_how_many_threads(artifact):
    """With 2 threads instead of 1 the weights of SmolLM2 were others, and nothing said why."""
    folder, report = artifact
    threads = str(torch.get_num_threads())
    assert report["environment"]["threads"] == threads and report["environment"]["instructions"]
    script = (folder / "reproduce.sh").read_text()
    assert f"export OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads}" in script
    assert ": sh reproduce.sh OUTPUT_DIR\n" in script  # a downloaded file is not executable
