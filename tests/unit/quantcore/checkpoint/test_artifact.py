"""Files beside the weights travel with a model: what its processors and tokenizers are loaded from."""

from pathlib import Path

from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

from quantcore.checkpoint.side_files import copy_side_files

OTHERS = (
    "processor_config.json", "video_preprocessor_config.json", "chat_template.json", "normalizer.json", "source.spm",
    "qwen.tiktoken",
)  # fmt: skip
LEFT = ("config.json", "quantize_config.json", "hf_quant_config.json", "training_args.bin", "modeling_own.py")


def test_processors_and_tokenizers_travel_and_nothing_else(tmp_path: Path) -> None:
    model, artifact = tmp_path / "model", tmp_path / "artifact"
    artifact.mkdir()
    WhisperFeatureExtractor(feature_size=40).save_pretrained(model)
    for name in (*OTHERS, *LEFT):
        (model / name).write_text("{}")
    assert set(copy_side_files(model, artifact)) == {"preprocessor_config.json", *OTHERS}
    assert AutoFeatureExtractor.from_pretrained(artifact).feature_size == 40
    assert all((artifact / name).read_text() == "{}" for name in OTHERS)
