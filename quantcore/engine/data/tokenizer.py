"""Loads the model's tokenizer without running foreign code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quantcore.checkpoint.folder import find_gguf
from quantcore.checkpoint.harmless import KeyPath
from quantcore.checkpoint.private_copies import lend, tokenizer_files
from quantcore.errors import ModelError, QuantError, is_failure, reason_of


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the folder or GGUF file ``model_dir``; tokenizer.json next to a GGUF file takes precedence.

    Raises ModelError ``no_tokenizer``, else as ``opening.open_file``.
    """
    gguf_file, inside = find_gguf(model_dir), {}
    if gguf_file is not None:
        model_dir = gguf_file.parent
        inside = {} if (model_dir / "tokenizer.json").exists() else {"gguf_file": gguf_file.name}
    scratch = model_dir
    try:
        with ExitStack() as stack:
            files = stack.enter_context(tokenizer_files(model_dir))
            scratch = files.folder
            if gguf_file is not None and inside:
                lend(gguf_file, scratch, stack)
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(scratch), local_files_only=True, trust_remote_code=False, **inside
            )
        check_left_out(type(tokenizer), "tokenizer_config.json", files.left_out.get("tokenizer_config.json", ()))
        tokenizer.name_or_path = str(model_dir)
    except QuantError:
        raise
    except BaseException as error:  # the libraries raise anything for a bad file, and some of them panic
        if not is_failure(error):
            raise
        raise ModelError(
            f"The model's tokenizer cannot be loaded: {reason_of(error).replace(str(scratch), 'the folder')}",
            code="no_tokenizer",
            hint="Put the model's tokenizer files (tokenizer.json, tokenizer_config.json) next to its weights. "
            "Custom tokenizer code is not run.",
        ) from error
    return tokenizer


def unpack_tokenizer(model_dir: Path, folder: Path) -> None:
    """Write the tokenizer inside a GGUF file to ``folder``, unless tokenizer files are next to the GGUF file.

    Does nothing for a model that is a folder. Raises as ``load_tokenizer``.
    """
    gguf_file = find_gguf(model_dir)
    if gguf_file is not None and not (gguf_file.parent / "tokenizer.json").exists():
        load_tokenizer(gguf_file).save_pretrained(folder)


def check_left_out(kind: type, file: str, left_out: Iterable[KeyPath]) -> None:
    """Raise ModelError ``unsafe_setting`` if a key that was left out of ``file`` is one that the class ``kind`` reads.

    Files of its vocabulary are found by their usual names, whatever the settings call them.
    """
    read = {name for part in kind.__mro__ if "__init__" in vars(part) for name in _parameters(part)}
    names = [".".join(path) for path in left_out if path[0] in read and not path[0].endswith("_file")]
    if names:
        raise ModelError(
            f"{file} has a value for '{names[0]}' that could be a path on this machine, so it is not passed to "
            f"{kind.__name__}.",
            code="unsafe_setting",
            hint=f"Remove '{names[0]}' from {file} if the model works without it.",
        )


def _parameters(kind: type) -> Iterable[str]:
    return inspect.signature(vars(kind)["__init__"]).parameters


def tokenize_with(
    tokenizer: PreTrainedTokenizerBase, *, with_special_tokens: bool = False
) -> Callable[[str], list[int]]:
    """Return a function from text to token ids, without special tokens. It raises ModelError ``bad_tokenizer``.

    ``with_special_tokens`` adds those that begin a text of this model.
    """

    def tokenize(text: str) -> list[int]:
        try:
            ids: list[int] = tokenizer(text, add_special_tokens=with_special_tokens, verbose=False)["input_ids"]
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ModelError(
                f"The model's tokenizer fails on a text: {reason_of(error)}",
                code="bad_tokenizer",
                hint="Its files (tokenizer.json, tokenizer_config.json) are damaged or do not match.",
            ) from error
        return ids

    return tokenize


def begin_of_text(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the special tokens with which this tokenizer begins a text (BOS), as every runtime does; () for none."""
    bare, whole = (tokenize_with(tokenizer, with_special_tokens=adds)("a") for adds in (False, True))
    starts = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    return tuple(whole[: next(starts, 0)])
