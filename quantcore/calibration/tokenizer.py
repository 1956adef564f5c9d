"""The model's tokenizer, loaded without running foreign code."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quantcore.checkpoint.gguf_header import find_gguf
from quantcore.checkpoint.libraries import lend, tokenizer_files
from quantcore.errors import ModelError


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder or GGUF file ``model_dir``; tokenizer.json beside a GGUF file goes before the file's.

    Raises ModelError ``no_tokenizer``, else as ``opening.open_file``.
    """
    gguf_file, inside = find_gguf(model_dir), {}
    if gguf_file is not None:
        model_dir = gguf_file.parent
        inside = {} if (model_dir / "tokenizer.json").exists() else {"gguf_file": gguf_file.name}
    try:
        with ExitStack() as stack:
            scratch = stack.enter_context(tokenizer_files(model_dir))
            if gguf_file is not None and inside:
                lend(gguf_file, scratch, stack)
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(scratch), local_files_only=True, **inside
            )
        tokenizer.name_or_path = str(model_dir)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelError(
            f"The tokenizer in {model_dir} cannot be loaded: {error}.",
            code="no_tokenizer",
            hint="Put the model's tokenizer files (tokenizer.json, tokenizer_config.json) beside its weights.",
        ) from error
    return tokenizer
