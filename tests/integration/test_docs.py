"""The pages about the engine: what they show runs, their commands are understood, their tables are true."""

import argparse
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo
from typer.main import get_command

from api.store.tables.chats import EndReason
from bitfoundry.commands.main import app
from quantcore.checkpoint.headers import read_tensor_headers
from quantcore.cli.flags import add_mix, add_speed, parser
from quantcore.cli.from_flags import task_of
from quantcore.cli.main import main
from quantcore.cli.plan_command import parser as planning_parser
from quantcore.config.algorithms import NAMES, config_of, load_quant_algo_config_from_file
from quantcore.config.presets import PRESETS
from quantcore.config.quantization import parse_config
from quantcore.config.recipes import recipe
from quantcore.export import EXPORTERS, formats_for, holds_codes
from quantcore.serving.stopwatch import RUNTIMES
from tests.support.docs import DOCS, blocks_of, read_page
from tests.support.models import tiny_model

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture
def folder(tmp_path):
    """A working folder with a tiny model where a reader has SmolLM2."""
    tiny_model(tmp_path / MODEL, num_hidden_layers=1, max_position_embeddings=2048)
    return tmp_path


def test_the_page_of_the_python_api(folder):
    read_page("how-to/python.md", folder)
    assert (folder / "exported" / "model.safetensors").is_file() and (folder / "onnx" / "model.onnx").is_file()
    assert (folder / "errors.svg").read_text().startswith("<svg ")


def test_the_page_of_chats(folder):
    turn = json.loads(read_page("how-to/chat.md", folder).outputs[0].splitlines()[-1])
    shown = [row[0] for row in rows_of((DOCS / "how-to" / "chat.md").read_text(), "In a program")]
    assert set(turn) == {name.strip("`") for cell in shown for name in cell.split(", ")}
    reasons = [row[0] for row in rows_of((DOCS / "how-to" / "chat.md").read_text(), "In the service")]
    assert {name.strip("`") for cell in reasons for name in cell.split(", ")} == set(EndReason)


ALGORITHMS = (DOCS / "how-to" / "algorithms.md").read_text()


def rows_of(page, title):
    """The cells of the table under a heading, without its head."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def commands_of(page):
    """The lines of a page's blocks for a shell, those that are not run included."""
    scripts = [block.script for block in blocks_of(page) if block.language in ("sh", "console")]
    return [line for script in scripts for line in script.replace("\\\n", "").splitlines()]


@pytest.mark.slow
def test_the_page_of_algorithms(folder):
    names = read_page("how-to/algorithms.md", folder).names
    assert [algorithm["name"] for algorithm in names["report"].config["algo_config"]] == ["awq", "rtn"]
    assert names["model"].model.layers[0].mlp.up_proj.frozen
    made = {path.parent.name for path in folder.glob("**/report.json")}
    assert made == {"fast", "balanced", "out", "smooth", "half", "out-python", "rounded", "both"}


def test_the_commands_of_the_page_of_algorithms(folder, monkeypatch):
    monkeypatch.chdir(folder)
    chosen = {}
    for command in commands_of("how-to/algorithms.md"):
        if command.startswith("echo "):
            _, options, _, file = shlex.split(command)
            (folder / file).write_text(options)
            continue
        program, verb, *flags = shlex.split(command)
        assert (program, verb) == ("bitfoundry", "quantize")
        task = task_of(parser().parse_args(flags))
        chosen[task.output_dir.name] = ([each.name for each in task.config.algo_config], task.export)
    assert chosen == {
        "fast": ([], ()),
        "balanced": (["gptq"], ()),
        "out": (["awq", "rtn"], ()),
        "smooth": (["rotation", "smoothquant"], ()),
        "half": (["smoothquant"], ()),
        "rounded": (["awq"], ("fake_quantized",)),
        "both": (["autosmoothquant"], ("quark", "fake_quantized")),
    }


def test_the_json_of_the_page_of_algorithms(tmp_path):
    config, edges = (json.loads(block.text) for block in blocks_of("how-to/algorithms.md") if block.language == "json")
    assert [one.name for one in parse_config(config).algo_config] == ["awq", "gptq"]
    (tmp_path / "awq.json").write_text(json.dumps(edges))
    assert len(load_quant_algo_config_from_file(tmp_path / "awq.json").scaling_layers) == 2


def default_of(field):
    return field.default.default if isinstance(field.default, FieldInfo) else field.default


def test_the_tables_of_the_page_of_algorithms():
    """Every algorithm has its row, every option its default; what is only read for AMD Quark's sake has none."""
    assert sorted(row[0].strip("`") for row in rows_of(ALGORITHMS, "Which one")) == sorted(NAMES)
    shown = {(name, option.strip("`")): json.loads(default.strip("`"))
             for names, option, default, _ in rows_of(ALGORITHMS, "Options")
             for name in re.findall(r"`(.+?)`", names)}  # fmt: skip
    not_needed = set(re.findall(r"`(\w+)`", ALGORITHMS.partition("Only `prev_op`")[2].partition("\n## ")[0]))
    elsewhere = {"name", "scaling_layers", "inside_layer_modules"} | not_needed
    options = {(name, field.name): default_of(field) for name in NAMES for field in fields(config_of(name))}
    options = {key: default for key, default in options.items() if key[1] not in elsewhere}
    assert shown.keys() - options.keys() == set()
    assert options.keys() - shown.keys() == {(name, "true_sequential") for name in ("gptaq", "yaqa", "qronos")}
    assert {key: options[key] for key in shown} == shown


ORDER = ["quark", "compressed_tensors", "fp8", "modelopt", "gptq", "gptq_v2", "awq", "bitsandbytes", "gguf", "onnx",
         "mlx", "fake_quantized"]  # fmt: skip


def test_the_flags_of_the_page_of_mixed_precision():
    page = (DOCS / "how-to" / "mixed-precision.md").read_text().partition("\n## In the service\n")[0]
    flags = argparse.ArgumentParser()
    add_mix(flags)
    of_quantize = {"--quant_scheme", "--output_dir", "--model_dir", "--quant_algo"}
    assert set(re.findall(r"--[a-z_]+", page)) <= {*flags._option_string_actions, *of_quantize, "--json"}


def test_the_flags_of_the_page_of_speed() -> None:
    page = (DOCS / "how-to" / "measure-speed.md").read_text()
    flags = argparse.ArgumentParser()
    add_speed(flags)
    assert set(re.findall(r"--[a-z_]+", page)) - {"--against", "--json"} == set(flags._option_string_actions) - {
        "-h",
        "--help",
    }
    assert set(re.findall(r"--runtime ([a-z_]+)", page)) <= set(RUNTIMES)


@pytest.mark.slow
def test_the_page_of_speed(folder):
    assert "prompt" in read_page("how-to/measure-speed.md", folder).output


@pytest.mark.slow
def test_the_page_of_formats(folder, capsys):
    read_page("reference/formats.md", folder)
    assert "uint4 torch.Size([1, 8, 512])" in capsys.readouterr().out
    assert (folder / "quark" / "MANIFEST.json").is_file()


def test_the_table_of_formats():
    page = (DOCS / "reference" / "formats.md").read_text()
    assert [row[0].strip("[]`").partition("`")[0] for row in rows_of(f"\n## formats\n{page}", "formats")] == ORDER
    assert sorted(ORDER) == sorted(EXPORTERS)


@pytest.mark.slow
def test_the_python_of_the_page_of_formats(folder, monkeypatch, capsys):
    """As the page, without a shell and its interpreters."""
    monkeypatch.chdir(folder)
    quantize, load, convert = (block for block in blocks_of("reference/formats.md") if block.runs)
    quick = ["--seq_len", "64", "--skip_evaluation", "--json"]
    assert main([*shlex.split(quantize.script)[2:], *quick]) == 0
    exec(compile(load.script, "formats.md", "exec"), {})
    assert "uint4 torch.Size([1, 8, 512])" in capsys.readouterr().out
    assert main(shlex.split(convert.script)[1:]) == 0
    assert (folder / "quark" / "MANIFEST.json").is_file()


@pytest.mark.slow
def test_the_page_of_onnx(folder, capsys):
    read_page("how-to/onnx.md", folder)
    assert len(capsys.readouterr().out.strip()) > len("The capital of France is")


@pytest.mark.slow
def test_the_page_of_mlx(folder):
    read_page("how-to/mlx.md", folder)
    settings = json.loads((folder / "out-mlx" / "config.json").read_text())["quantization"]
    assert settings == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert "model.embed_tokens.scales" in read_tensor_headers(folder / "out-mlx")


def test_the_presets_of_the_page_of_mlx():
    named = [name for row in rows_of((DOCS / "how-to" / "mlx.md").read_text(), "Modes") for name in row[1].split(", ")]
    assert {name.strip("`") for name in named if name} == {
        preset.name for preset in PRESETS.values() if "mlx" in formats_for(preset.config)
    }


@pytest.mark.slow
def test_the_page_of_gguf(folder):
    read_page("how-to/gguf.md", folder)
    assert (folder / "out-gguf" / "SmolLM2-135M-Instruct-Q4_K_M.gguf").is_file() and (
        folder / "out-awq" / "MANIFEST.json"
    ).is_file()


@pytest.mark.slow
def test_the_page_of_quantizing_locally(folder):
    report = read_page("how-to/quantize-locally.md", folder).names["report"]
    assert report.config["global_quant_config"]["weight"]["dtype"] == "fp8_e4m3"
    named = re.findall(r"^\| `(\w+\.\w+)`", (DOCS / "how-to" / "quantize-locally.md").read_text(), flags=re.MULTILINE)
    made = {path.name for path in (folder / "out").iterdir()}
    assert set(named) - {"model.gguf", "model.onnx"} <= made


@pytest.mark.slow
def test_the_page_of_resuming(folder):
    read_page("how-to/resume.md", folder)
    assert (folder / "out" / "MANIFEST.json").is_file() and not (folder / ".out.resume").exists()


def test_the_page_of_planning(tmp_path):
    (tmp_path / "Llama-3.1-405B").mkdir()
    (tmp_path / "Llama-3.1-405B" / "config.json").write_bytes(LLAMA_405B.read_bytes())
    assert "fits 8 x 80.0 GB" in read_page("how-to/plan-capacity.md", tmp_path).output


def test_the_table_of_presets():
    """As ``python -m quantcore presets`` says it."""
    rows = rows_of((DOCS / "reference" / "config.md").read_text(), "Presets")
    expected = []
    for preset in PRESETS.values():
        formats = [name for name in formats_for(preset.config) if holds_codes(name)]
        aliases = ", ".join(f"`{alias}`" for alias in preset.aliases)
        calibrated = "yes" if preset.needs_calibration else ""
        chains = [
            ", ".join(f"`{algorithm.name}`" for algorithm in recipe([preset.config], effort))
            for effort in ("balanced", "best")
        ]
        held = ", ".join(formats) or "`fake_quantized` alone"
        expected.append([f"`{preset.name}`", preset.title, calibrated, *chains, held, aliases])
    assert rows == expected


CONFIGS = Path(__file__).parents[1] / "unit" / "quantcore" / "configs"
LLAMA_405B = CONFIGS / "llama-3.1-405b.json"
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


def test_the_planned_figures_are_the_command_s(capsys):
    rows = rows_of((DOCS / "benchmarks.md").read_text(), "Llama-3.1-405B on one node, and on two")
    assert len(rows) == 8
    for row in rows:
        flags, hardware = (cell.strip("`") for cell in row[:2])
        assert row == planned_row(flags, hardware, capsys)


TIMES = "--quant_scheme w4a16 --quant_algo gptq --num_calib_data 128 --seq_len 2048 --disk 4TB --json"


def test_the_planned_times_are_the_command_s(capsys):
    rows = rows_of((DOCS / "benchmarks.md").read_text(), "Planned times on H100s")
    assert len(rows) == 4
    for model, devices, *times in rows:
        file = CONFIGS / f"{model.lower().replace(' ', '-')}.json"
        assert main(["plan", str(file), *shlex.split(f"--devices {devices.strip('`')} {TIMES}")]) == 0
        seconds = json.loads(capsys.readouterr().out)["seconds"]
        computing = sum(seconds[step] for step in ("forward", "statistics", "solve"))
        assert times == [f"{part / 60:.1f} min" for part in (seconds["total"], computing, seconds["prove"])]


SCALING = ("plan-capacity", "several-devices", "file-to-file", "resume")


def test_the_commands_of_the_pages_about_large_models_are_understood():
    """Those included that no test can run."""
    kinds = []
    for line in [line for page in SCALING for line in commands_of(f"how-to/{page}.md")]:
        words = shlex.split(line)
        if words[:2] == ["bitfoundry", "plan"]:
            planning_parser().parse_args(words[2:])
        elif words[:2] == ["bitfoundry", "submit"]:
            get_command(app).commands["submit"].make_context("submit", words[2:])
        elif words[:2] == ["bitfoundry", "quantize"]:
            task_of(parser().parse_args(words[2:]))
        elif "--model_dir" in words:
            task_of(parser().parse_args(words[words.index("--model_dir") :]))
        kinds.append(" ".join(words[:2]) if words[0] == "bitfoundry" else words[0])
    assert {"bitfoundry plan", "bitfoundry quantize", "bitfoundry submit", "torchrun"} <= set(kinds)
