"""The model's tokenizer, loaded without running foreign code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quantcore.checkpoint.gguf_header import find_gguf
from quantcore.errors import ModelError, is_failure, reason_of


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
            str(model_dir), local_files_only=True, trust_remote_code=False, **inside
        )
    except BaseException as error:  # the libraries raise anything for a bad file, and some of them panic
        if not is_failure(error):
            raise
        raise ModelError(
            f"The model's tokenizer cannot be loaded: {reason_of(error).replace(str(model_dir), 'the folder')}",
            code="no_tokenizer",
            hint="Put the model's tokenizer files (tokenizer.json, tokenizer_config.json) beside its weights. A"
            " tokenizer that needs code of its own is not run.",
        ) from error
    return tokenizer


def tokenize_with(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """What gives a text's token ids, without special tokens. It raises ModelError ``bad_tokenizer``."""

    def tokenize(text: str) -> list[int]:
        try:
            ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ModelError(
                f"The model's tokenizer fails on a text: {reason_of(error)}",
                code="bad_tokenizer",
                hint="Its files (tokenizer.json, tokenizer_config.json) are damaged, or do not belong together.",
            ) from error
        return ids

    return tokenize
