"""Converts a GGUF file to a plain safetensors model folder, so that the engine has one kind of input."""

from __future__ import annotations

from pathlib import Path

from quantcore.checkpoint.artifact import building
from quantcore.errors import ModelError

GENERATED_KEYS = ("_name_or_path", "quantization_config", "transformers_version")


def unpack(gguf_file: Path, model_dir: Path) -> None:
    """Write config, tokenizer and bfloat16 weights of ``gguf_file`` to ``model_dir``, atomically.

    Transformers reads the GGUF but refuses to save the model it made, so the weights move into a plain model built
    from the cleaned config. The whole model is in memory during that time. Raises ModelError ``invalid_gguf``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not gguf_file.is_file():
        raise ModelError(f"There is no GGUF file at {gguf_file}.", code="model_not_found")
    folder, name = str(gguf_file.parent), gguf_file.name
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{gguf_file} cannot be read: {error}.", code="invalid_gguf") from error
    settings = {key: value for key, value in loaded.config.to_dict().items() if key not in GENERATED_KEYS}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    with building(model_dir) as partial:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
