"""The code of the documentation runs, block after block; its commands are understood, its tables true."""

import argparse
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from bitfoundry.commands.main import app
from quantcore.cli.flags import add_mix, add_speed, parser, task_of
from quantcore.cli.main import main
from quantcore.cli.plan_command import parser as planning_parser
from quantcore.config.algorithms import NAMES, config_of, load_quant_algo_config_from_file
from quantcore.config.presets import PRESETS
from quantcore.config.quantization import parse_config
from quantcore.export import EXPORTERS, formats_for, holds_codes
from quantcore.serving.stopwatch import RUNTIMES
from tests.factories import tiny_model

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with a model called ``model``."""
    folder = tmp_path_factory.mktemp("docs")
    tiny_model(folder / "model", num_hidden_layers=1)
    return folder


def test_the_page_of_the_python_api(folder, monkeypatch):
    monkeypatch.chdir(folder)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert (folder / "exported" / "model.safetensors").is_file() and (folder / "onnx" / "model.onnx").is_file()
    assert (folder / "errors.svg").read_text().startswith("<svg ") and len(names["table"]) == 7


ALGORITHMS = (DOCS / "algorithms.md").read_text()


def blocks_of(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def rows_of(page, title):
    """The cells of the table under a heading, without its head."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_python_of_the_page_of_algorithms(folder, monkeypatch):
    monkeypatch.chdir(folder)
    blocks = blocks_of(ALGORITHMS, "python")
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/algorithms.md", "exec"), names)
    assert [one["name"] for one in names["report"]["config"]["algo_config"]] == ["awq", "rtn"]
    assert (folder / "out" / "model.safetensors").is_file() and names["model"].model.layers[0].mlp.up_proj.frozen


def test_the_commands_of_the_page_of_algorithms(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "smooth.json").write_text(re.search(r"`(\{\"name\": \"smoothquant\".*?\})`", ALGORITHMS)[1])
    commands = [line for block in blocks_of(ALGORITHMS, "sh") for line in block.replace("\\\n", "").splitlines()]
    said = {}
    for command in commands:
        program, verb, *flags = shlex.split(command)
        assert (program, verb) == ("bitfoundry", "quantize")
        task = task_of(parser().parse_args(flags))
        said[task.output_dir.name] = ([one.name for one in task.config.algo_config], task.export)
    assert said == {
        "out": (["awq", "rtn"], ("quark",)),
        "smooth": (["rotation", "smoothquant"], ("quark",)),
        "half": (["smoothquant"], ("quark",)),
        "rounded": (["awq"], ("fake_quantized",)),
        "both": (["autosmoothquant"], ("quark", "fake_quantized")),
    }


def test_the_json_of_the_page_of_algorithms(tmp_path):
    config, edges = map(json.loads, blocks_of(ALGORITHMS, "json"))
    assert [one.name for one in parse_config(config).algo_config] == ["awq", "gptq"]
    (tmp_path / "awq.json").write_text(json.dumps(edges))
    assert len(load_quant_algo_config_from_file(tmp_path / "awq.json").scaling_layers) == 2


def test_the_tables_of_the_page_of_algorithms():
    """Every algorithm has its row, every option its default; what is only read for AMD Quark's sake has none."""
    assert sorted(row[0].strip("`") for row in rows_of(ALGORITHMS, "Which one")) == sorted(NAMES)
    shown = {(name, option.strip("`")): json.loads(default.strip("`"))
             for names, option, default, _ in rows_of(ALGORITHMS, "Options")
             for name in re.findall(r"`(.+?)`", names)}  # fmt: skip
    not_needed = set(re.findall(r"`(\w+)`", ALGORITHMS.partition("Only `prev_op`")[2].partition("\n## ")[0]))
    elsewhere = {"name", "scaling_layers", "inside_layer_modules"} | not_needed
    options = {(name, field.name): field.default for name in NAMES for field in fields(config_of(name))}
    options = {key: default for key, default in options.items() if key[1] not in elsewhere}
    assert shown.keys() - options.keys() == set()
    assert options.keys() - shown.keys() == {("gptaq", "true_sequential"), ("qronos", "true_sequential")}
    assert {key: options[key] for key in shown} == shown


ORDER = ["quark", "compressed_tensors", "fp8", "gptq", "gptq_v2", "awq", "bitsandbytes", "gguf", "onnx",
         "fake_quantized"]  # fmt: skip


def test_the_page_of_mixed_precision(folder, monkeypatch):
    monkeypatch.chdir(folder)
    page = (DOCS / "mixed-precision.md").read_text().partition("\n## In the service\n")[0]  # that: test_mixed_jobs.py
    [block] = blocks_of(page, "sh")
    for line in block.replace("./SmolLM2-135M-Instruct", "./model").replace("./out", "./mixed").splitlines():
        _, command, *arguments = shlex.split(line)
        name = [command] if command == "mix" else []
        assert main([*name, *arguments, "--num_calib_data", "4", "--seq_len", "32"]) == 0
    assert parse_config(json.loads((folder / "mix.json").read_text())).layer_quant_config
    assert (folder / "mixed" / "report.json").is_file()
    flags = argparse.ArgumentParser()
    add_mix(flags)
    of_quantize = {"--quant_scheme", "--output_dir", "--model_dir", "--quant_algo"}
    assert set(re.findall(r"--[a-z_]+", page)) <= {*flags._option_string_actions, *of_quantize, "--json"}


def test_the_page_of_speed() -> None:
    """The commands run in ``test_speed``; their flags are those that there are."""
    section = (DOCS / "evaluation.md").read_text().partition("## Speed and memory")[2].partition("\n## ")[0]
    flags = argparse.ArgumentParser()
    add_speed(flags)
    assert set(re.findall(r"--[a-z_]+", section)) - {"--against", "--json"} == set(flags._option_string_actions) - {
        "-h",
        "--help",
    }
    assert set(re.findall(r"--runtime ([a-z_]+)", section)) <= set(RUNTIMES)


def test_the_page_of_formats(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    page = (DOCS / "exports.md").read_text()
    assert [row[0].strip("[]`").partition("`")[0] for row in rows_of(f"\n## formats\n{page}", "formats")] == ORDER
    assert sorted(ORDER) == sorted(EXPORTERS)
    flags = "--model_dir model --output_dir awq --quant_scheme uint4_wo_32 --custom_mode awq --seq_len 64"
    assert main([*flags.split(), "--skip_evaluation", "--json"]) == 0
    [block] = blocks_of(page, "python")
    exec(compile(block, "docs/exports.md", "exec"), {})
    assert "uint4 torch.Size([1, 8, 512])" in capsys.readouterr().out
    [command] = blocks_of(page, "console")
    assert main(shlex.split(command.removeprefix("$ bitfoundry"))) == 0
    assert (folder / "quark" / "MANIFEST.json").is_file()


@pytest.mark.slow
def test_the_page_of_onnx(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    page = (DOCS / "onnx.md").read_text()
    command, code = *blocks_of(page, "sh"), *blocks_of(page, "python")
    _, verb, *flags = shlex.split(command)
    assert verb == "quantize" and main([*flags, "--seq_len", "64", "--skip_evaluation", "--json"]) == 0
    capsys.readouterr()
    exec(compile(code, "docs/onnx.md", "exec"), {})
    assert len(capsys.readouterr().out.strip()) > len("The capital of France is")


def test_the_table_of_presets():
    """As ``bitfoundry quantize presets`` says it."""
    rows = rows_of((DOCS / "config.md").read_text(), "In three lines")
    expected = []
    for preset in PRESETS.values():
        formats = [name for name in formats_for(preset.config) if holds_codes(name)]
        aliases = ", ".join(f"`{alias}`" for alias in preset.aliases)
        calibrated = "yes" if preset.needs_calibration else ""
        held = ", ".join(formats) or "`fake_quantized` alone"
        expected.append([f"`{preset.name}`", preset.title, calibrated, held, aliases])
    assert rows == expected


LARGE = (DOCS / "large-models.md").read_text()
LLAMA_405B = Path(__file__).parents[1] / "unit" / "quantcore" / "configs" / "llama-3.1-405b.json"
COMMON = "--num_calib_data 512 --seq_len 2048 --host_memory 1TB --disk 4TB --json"


def planned_row(flags, hardware, capsys):
    """A row of the table of large models, as the command has it."""
    status = main(["plan", str(LLAMA_405B), *shlex.split(f"{flags} {hardware} {COMMON}")])
    found = json.loads(capsys.readouterr().out)
    assert status == (0 if found["fits"] else 1)
    sizes = (found[name]["total"] / 1e9 for name in ("bytes_per_rank", "host_bytes_per_node", "disk_bytes"))
    device, host, disk = (f"{size:.0f} GB" for size in sizes)
    runs = found["executor"] if found["fits"] else f"{found['executor']}, does not fit"
    return [f"`{flags}`", f"`{hardware}`", f"`{runs}`", device, host, disk, f"{found['seconds']['total'] / 60:.0f} min"]


def test_the_figures_of_the_page_of_large_models_are_the_command_s(capsys):
    rows = rows_of(LARGE, "Llama-3.1-405B on one node, and on two")
    assert len(rows) == 8
    for row in rows:
        flags, hardware = (cell.strip("`") for cell in row[:2])
        assert row == planned_row(flags, hardware, capsys)


def test_the_commands_of_the_page_of_large_models_are_understood():
    lines = [line for block in blocks_of(LARGE, "console") for line in block.replace("\\\n", "").splitlines()]
    kinds = []
    for line in lines:
        words = shlex.split(line.removeprefix("$ "))
        if words[:2] == ["bitfoundry", "plan"]:
            planning_parser().parse_args(words[2:])
        elif words[:2] == ["bitfoundry", "submit"]:
            get_command(app).commands["submit"].make_context("submit", words[2:])
        elif "--model_dir" in words:
            task_of(parser().parse_args(words[words.index("--model_dir") :]))
        kinds.append(" ".join(words[:2]) if words[0] == "bitfoundry" else words[0])
    assert {"bitfoundry plan", "bitfoundry quantize", "bitfoundry submit", "torchrun"} <= set(kinds)
