"""The model's tokenizer, loaded without running foreign code."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quantcore.checkpoint.gguf_header import find_gguf
from quantcore.errors import ModelError


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder or GGUF file ``model_dir``; tokenizer.json beside a GGUF file goes before the file's.

    Raises ModelError ``no_tokenizer``.
    """
    gguf_file, inside = find_gguf(model_dir), {}
    if gguf_file is not None:
        model_dir = gguf_file.parent
        inside = {} if (model_dir / "tokenizer.json").exists() else {"gguf_file": gguf_file.name}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, **inside
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelError(
            f"The tokenizer in {model_dir} cannot be loaded: {error}.",
            code="no_tokenizer",
            hint="Put the model's tokenizer files (tokenizer.json, tokenizer_config.json) beside its weights.",
        ) from error
    return tokenizer
