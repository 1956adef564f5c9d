"""The model's tokenizer, loaded without running foreign code."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quantcore.errors import ModelError


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in ``model_dir``. Raises ModelError ``no_tokenizer``."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelError(
            f"The tokenizer in {model_dir} cannot be loaded: {error}.",
            code="no_tokenizer",
            hint="Put the model's tokenizer files (tokenizer.json, tokenizer_config.json) beside its weights.",
        ) from error
    return tokenizer
