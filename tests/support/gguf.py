"""Configs of the architectures for which GGUF files are written, and jobs that write them."""

from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFWriter

from quantcore.config.quantization import CalibrationConfig, Config
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.pipeline import job as pipeline
from tests.support.models import MIXTURES

SIXTEEN = {"query_pre_attn_scalar": 16, "sliding_window": 8}
LLAMA3 = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "llama": {},
    "mistral": {"tie_word_embeddings": False},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"head_dim": 32},
    "gemma2": {**SIXTEEN, "final_logit_softcapping": 5.0},
    "gemma3_text": {**SIXTEEN, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"tie_word_embeddings": False},
    "qwen3_moe": {**MIXTURES["qwen3_moe"], "norm_topk_prob": True},
    "mixtral": MIXTURES["mixtral"],
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}

CALIBRATION = CalibrationConfig(num_samples=4, seq_len=64)


def split(file: Path, folder: Path, *, max_tensors: int) -> Path:
    """Split a GGUF file as gguf's own writer does, and return the first part."""
    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    folder.mkdir()
    writer = GGUFWriter(folder / "tiny.gguf", architecture, split_max_tensors=max_tensors)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.iterdir())


def run(model: Path, folder: Path, config: Config, exports: tuple[str, ...] = ("gguf",)) -> dict[str, Any]:
    """The report of one job; its proof has passed."""
    task = Task(
        model_dir=model, output_dir=folder, config=config, export=exports, calibration=CALIBRATION,
        evaluation=EvaluationConfig(num_windows=3, seq_len=64, num_prompts=0),
    )  # fmt: skip
    report = pipeline.run(task, lambda event: None)
    assert report is not None
    return report.to_dict()
