"""The golden record: the SHA-256 of every file that jobs on tiny models write, so that a refactoring changes none.

``golden_record.json`` holds them for four families of models and a matrix of schemes, algorithms and export formats.
``python -m tests.conformance.golden_record --write`` writes the record again after a change of bytes that is meant.

Weights, tokenizer and text are made of whole numbers, and this process computes with kernels that every x86-64
processor has (``SAME_KERNELS``). Even so, sums have other last digits on Intel's processors than elsewhere: there are
two records. After a change that is meant, the machine at hand writes its own one. Of the other, what follows from sums
is removed (``awaits``), and not compared there until the record is written on such a processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
MAKER = "intel" if "GenuineIntel" in Path("/proc/cpuinfo").read_text() else "other"
"""Which of the records holds on this machine."""
SAME_KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
VOCAB_SIZE = 256  # one token a byte
NUM_WINDOWS, SEQ_LEN = 70, 32  # windows that two ranks cannot share evenly

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen2"},  # its projections have biases
    "mixture": {"model_type": "qwen3_moe", **_EXPERTS},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "fused": {"model_type": "phi3"},
}

GPTQ = {"name": "gptq"}
Cell = tuple[str, list[dict[str, Any]], tuple[str, ...], dict[str, Any]]
CELLS: dict[str, Cell] = {
    "w4a16": ("w4a16", [], ("awq", "compressed_tensors", "gptq_v2", "onnx", "quark", "fake_quantized"), {}),
    "w4a16_file2file": ("w4a16", [], ("quark", "awq"), {"file2file": True}),
    "w4a16_awq_gptq": ("w4a16", [{"name": "awq"}, GPTQ], ("awq", "quark"), {}),
    "w4a16_sym_gptq": ("w4a16_sym", [GPTQ], ("gptq", "gptq_v2", "compressed_tensors"), {}),
    "w4a16_actorder": ("w4a16_sym", [{**GPTQ, "desc_act": True, "static_groups": False}], ("gptq",), {}),
    "w4a16_sequential": ("w4a16", [{**GPTQ, "true_sequential": True}], ("quark",), {}),
    "int8_smoothquant": ("int8_static", [{"name": "smoothquant"}], ("compressed_tensors", "onnx", "quark"), {}),
    "int8_autosmoothquant": ("int8", [{"name": "autosmoothquant"}, {"name": "bias_correction"}], ("quark",), {}),
    "int8_dynamic_gptaq": ("int8_dynamic", [{"name": "gptaq"}], ("compressed_tensors",), {}),
    "fp8_kv_cache": ("fp8", [], ("fp8", "quark"), {"kv_cache": "fp8"}),
    "fp8_dynamic_file2file": ("fp8_dynamic", [], ("compressed_tensors",), {"file2file": True}),
    "mxfp4_rotation_gptaq": ("mxfp4", [{"name": "rotation"}, {"name": "gptaq"}], ("quark",), {}),
    "nvfp4_qronos": ("nvfp4", [{"name": "qronos"}], ("compressed_tensors", "quark"), {}),
    "nf4": ("nf4_double_quant", [], ("bitsandbytes",), {}),
    "gguf_q4_0_gptq": ("gguf_q4_0", [GPTQ], ("gguf", "fake_quantized"), {}),
    "int4_fp8_rtn": ("int4_fp8", [{"name": "rtn"}], ("quark",), {}),
    "mixed": ("", [GPTQ], ("quark",), {"mix": ("w4a16", "int8_weight_only")}),
}
"""Scheme, algorithms, export formats and what else a job says, by the name of the cell."""

AWAITED = {"w4a16_awq_gptq", "w4a16_sequential", "int8_dynamic_gptaq", "mixed"}
"""Calibrated cells with asymmetric codes, whose rule for ranges changed: what follows from it awaits Intel's record."""

WITHOUT_EXPERTS = {"gguf", "onnx"}
"""Formats that refuse this family of mixtures."""


def names() -> list[str]:
    return [f"{family} {cell}" for family in FAMILIES for cell in CELLS]


def awaits(name: str, path: str) -> bool:
    """Whether a record may lack this file of a cell: a report, or one of a cell that is ``AWAITED``."""
    return path == "report.json" or name.split()[1] in AWAITED


def make_model(folder: Path, *, model_type: str, tie_word_embeddings: bool = False, **more: Any) -> None:
    """Save a model of three blocks in ``folder`` whose weights are whole numbers over a power of two."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.tokenizers import save_byte_tokenizer

    config = AutoConfig.for_model(
        model_type, vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=0,
        eos_token_id=0, pad_token_id=0, tie_word_embeddings=tie_word_embeddings, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            steps = torch.randint(-32, 33, (4, *parameter.shape)).sum(0)  # close to a normal distribution
            is_norm = parameter.ndim == 1 and "norm" in name
            parameter.copy_(1 + steps / 512 if is_norm else steps / 256)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    save_byte_tokenizer(folder)


def write_text(path: Path) -> None:
    """Write text of letters that follow each other by a rule, with a little chance from a linear congruence."""
    state, letters = 1, []
    for position in range(20_000):
        state = (state * 1_103_515_245 + 12_345) % (1 << 31)
        letters.append("etaoin shrdlu"[(position * position + (state >> 16) % 4) % 13])
    path.write_text("".join(letters))


def task_of(name: str, folder: Path, output_dir: Path) -> dict[str, Any]:
    """The job of a cell, as ``python -m quantcore run`` reads it; ``folder`` holds models and text."""
    from quantcore import presets

    family, cell = name.split()
    scheme, algorithms, exports, more = CELLS[cell]
    if family == "mixture":
        exports = tuple(export for export in exports if export not in WITHOUT_EXPERTS)
    task: dict[str, Any] = {
        "model_dir": str(folder / family), "output_dir": str(output_dir), "export": exports,
        "file2file": more.get("file2file", False), "gate": "off",
        "calibration": {"source": str(folder / "text.txt"), "num_samples": NUM_WINDOWS, "seq_len": SEQ_LEN},
        "evaluation": {"num_windows": 0 if "file2file" in more else 4, "seq_len": SEQ_LEN, "num_prompts": 0,
                       "num_answers": 0},
    }  # fmt: skip
    if schemes := more.get("mix"):
        configs = {scheme: presets.resolve(scheme).to_dict() for scheme in schemes}
        task["mix"] = {"schemes": schemes, "max_bits": 6.0, "configs": configs}
        task["config"] = {"global_quant_config": {}, "algo_config": algorithms}
    else:
        config = presets.resolve(scheme, kv_cache=more.get("kv_cache")).to_dict()
        task["config"] = {**config, "algo_config": algorithms}
    return task


FOR_PEOPLE = {"README.md", "report.html", "reproduce.sh", "MANIFEST.json"}
"""Files that say in words, times and paths what the others hold, and the list of all files with their hashes."""
MEASURED = {
    "total_s",
    "seconds_by_phase",
    "quantize_s",
    "peak_memory_bytes",
    "planned_peak_memory_bytes",
    "memory_by_phase",
    "ranks",
    "environment",
    "path",
    "source",
}
"""Fields of report and plan that another run, machine or number of ranks gives other values."""
ADDED = {
    "by_position",
    "bytes",
    "clipping",
    "distillation",
    "experts",
    "is_refused",
    "kl_stderr",
    "load",
    "more_bits",
    "num_answers",
    "num_weights",
    "perplexity_ratio_stderr",
    "programs",
    "refusals",
    "verdict",
}
"""Fields that report and plan did not have yet when the record was made, or that follow a table of other programs."""


def hashes(output_dir: Path) -> dict[str, str]:
    """The SHA-256 of each file that a job wrote for programs; of reports and plans without what is measured or new."""
    paths = sorted(path for path in output_dir.rglob("*") if path.is_file() and path.name not in FOR_PEOPLE)
    return {path.relative_to(output_dir).as_posix(): hashlib.sha256(_content(path)).hexdigest() for path in paths}


def _content(path: Path) -> bytes:
    if path.name not in ("report.json", "plan.json"):
        return path.read_bytes()
    data = json.loads(path.read_text())
    if path.name == "report.json":
        data["summary"]["worst_layer"] = _worst_by_weight(data["layers"])
    return json.dumps(_without_measured(data), sort_keys=True).encode()


def _worst_by_weight(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst layer of a report as it was when the record was made: that with the largest error of its weight."""
    worst = max(layers, key=lambda layer: layer["relative_error"])
    return {name: worst[name] for name in ("name", "relative_error", "sqnr_db")}


def _without_measured(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_measured(entry) for key, entry in value.items() if key not in MEASURED | ADDED}
    return [_without_measured(entry) for entry in value] if isinstance(value, list) else value


def run_here(name: str, num_ranks: int, folder: Path) -> dict[str, str]:
    """The hashes of the cell called ``name``, quantized on ``num_ranks`` forks of this process."""
    from quantcore.cli.main import main
    from tests.support.forks import forked
    from tests.support.proofs import proving_here

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output_dir, file = Path(scratch) / "out", Path(scratch) / "task.json"
        file.write_text(json.dumps(task_of(name, folder, output_dir)))
        with proving_here():
            statuses = forked(lambda _: main(["run", str(file)]), num_ranks, Path(scratch))
        if statuses != [0] * num_ranks:
            return {"refused": _refusal(Path(scratch), name)}
        return hashes(output_dir)


def _refusal(scratch: Path, name: str) -> str:
    """The code of the error with which a job was refused. Raises RuntimeError for one that failed in another way."""
    from tests.support.forks import events_of

    last = events_of(scratch)[-1]
    if last.get("code") in (None, "unexpected_error"):
        raise RuntimeError(f"{name}: {last}\n{(scratch / 'err.0').read_text()[-2000:]}")
    return str(last["code"])


def run(cells: Iterable[str], num_ranks: int) -> dict[str, dict[str, str]]:
    """``run_here`` for each of ``cells`` in a process that computes with ``SAME_KERNELS``."""
    command = [sys.executable, "-m", "tests.conformance.golden_record", "--ranks", str(num_ranks), *cells]
    environment = {**os.environ, **SAME_KERNELS, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", help="for example 'dense w4a16'; default: all")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write this machine's record into golden_record.json")
    options = parser.parse_args()
    cells = options.cells or names()
    if options.write:
        records = json.loads(RECORD.read_text())
        made = records[MAKER] | run(cells, 1)
        records[MAKER] = {name: made[name] for name in names()}
        RECORD.write_text(json.dumps(records, indent=1) + "\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_text(folder / "text.txt")
        for family in {cell.split()[0] for cell in cells}:
            make_model(folder / family, **FAMILIES[family])
        print(json.dumps({cell: run_here(cell, options.ranks, folder) for cell in cells}))


if __name__ == "__main__":
    main()
