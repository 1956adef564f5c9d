"""A path that does not exist is found before torch loads, which takes seconds."""

import json
import subprocess
import sys

import pytest

from tests.support.models import tiny_model

SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from quantcore.cli.main import main

results = {}
for case, line in json.loads(sys.argv[1]).items():
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        status = main(line)
    loaded = sorted({"torch", "transformers", "datasets"} & sys.modules.keys())
    results[case] = {"status": status, "loaded": loaded, "said": " ".join(said.getvalue().split())}
print(json.dumps(results))
"""
GOAL = ["--runtime", "vllm", "--device", "24GB"]
LINES = {
    "quantize": ["quantize", "nowhere", "w4a16"],
    "quantize with AMD Quark's flags": ["--model_dir", "nowhere", "--output_dir", "out", "--quant_scheme", "fp8"],
    "quantize with events": ["quantize", "nowhere", "--json"],
    "auto": ["auto", "nowhere", *GOAL],
    "mix": ["mix", "nowhere", "--schemes", "w4a16", "fp8", "--max_bits", "5"],
    "mix's text": ["mix", "model", "--schemes", "w4a16", "fp8", "--max_bits", "5", "--dataset", "nowhere.txt"],
    "convert": ["convert", "nowhere", "--to", "awq"],
    "imatrix": ["imatrix", "nowhere", "-o", "im.gguf"],
    "imatrix's text": ["imatrix", "model", "-o", "im.gguf", "--dataset", "nowhere.txt"],
    "an importance matrix": ["quantize", "model", "--imatrix", "nowhere.gguf"],
    "evaluate": ["evaluate", "nowhere"],
    "evaluate's original": ["evaluate", "model", "--against", "nowhere"],
    "evaluate's text": ["evaluate", "model", "--eval_dataset", "nowhere.jsonl"],
    "speed": ["speed", "nowhere"],
    "chat": ["chat", "nowhere"],
    "chat's original": ["chat", "model", "--against", "nowhere"],
    "compare": ["compare", "model", "nowhere", "--against", "model"],
    "the text for calibration": ["quantize", "model", "--dataset", "nowhere.csv.gz"],
    "one of two texts": ["quantize", "model", "--dataset", "builtin:1,nowhere.txt:1"],
    "the text for the evaluation": ["quantize", "model", "--eval_dataset", "nowhere.jsonl"],
    "no model in the folder": ["quantize", "nothing"],
    "an adapter": ["quantize", "adapter"],
    "a folder that is taken": ["quantize", "model", "-o", "adapter"],
    "the folder without a name, taken": ["quantize", "model", "w4a16"],
}
WORDS = {
    "no model in the folder": "config.json",
    "an adapter": "adapter",
    "a folder that is taken": "The output folder",
    "the folder without a name, taken": "model-w4a16 is not empty",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of LINES ended with, in one process: none of them loads torch."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model(folder / "model", num_hidden_layers=1)
    for name, file in (("nothing", "notes.txt"), ("adapter", "adapter_config.json"), ("model-w4a16", "notes.txt")):
        (folder / name).mkdir()
        (folder / name / file).write_text("{}")
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(LINES)], cwd=folder, capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout)


@pytest.mark.parametrize("case", LINES)
def test_what_is_missing_is_told_before_torch_loads(results, case):
    assert results[case]["status"] == 1
    assert results[case]["loaded"] == []
    assert WORDS.get(case, "nowhere") in results[case]["said"]
