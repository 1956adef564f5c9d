"""A tokenizer as GGUF metadata, taken from the tokenizers library's own description of it (tokenizer.json).

Two kinds are known: byte-level BPE (GGUF's "gpt2") and sentencepiece BPE with byte fallback (GGUF's "llama"). llama.cpp
has its own names for the regular expressions that split a text before BPE, so the right name is looked up here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantcore.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType
_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>")  # added tokens that are control tokens in any case
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
NO_MERGE = -1e6  # the score of tokens that no merge makes, below the scores of all merges

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+%s|" + r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*%s|"
_CASES_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_DBRX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+"
)

PRE_TOKENIZERS = {
    ("words",): "gpt-2",
    ("digits", "words"): "smollm",
    (_WORDS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_WORDS + r"\p{N}" + _REST,): "qwen2",
    (_CASES % ("", "") + r"\p{N}" + _CASES_REST,): "tekken",
    (_CASES % (_ENDINGS, _ENDINGS) + r"\p{N}{1,3}" + _CASES_REST,): "gpt-4o",
    (_DBRX,): "dbrx",
}
"""llama.cpp's names of sequences of pre-tokenizers. ``words`` is the expression inside ByteLevel, GPT-2's."""


@dataclass(frozen=True)
class TokenizerData:
    """The tokenizer of a GGUF file. ``special`` are ids by kind (bos, eos, unk, pad ...).

    ``scores`` is empty for byte-level BPE, ``merges`` for sentencepiece.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool | None
    chat_template: str | None
    warnings: tuple[str, ...]


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> TokenizerData:
    """Return the GGUF metadata of ``tokenizer``, for a model whose embedding has ``num_rows`` rows.

    Raises ModelError ``unsupported_tokenizer`` for any other kind than the two that are known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    data: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    model = data.get("model", {})
    if model.get("type") != "BPE":
        raise ModelError(
            f"GGUF export supports only BPE tokenizers, but that of {tokenizer.name_or_path} is "
            f"{model.get('type', 'not a fast one')}.",
            code="unsupported_tokenizer",
            hint="Remove gguf from the formats.",
        )
    added = {entry["content"]: entry for entry in data.get("added_tokens", [])}
    vocabulary = {**model["vocab"], **{text: entry["id"] for text, entry in added.items()}}
    warnings = _too_many(vocabulary, num_rows)
    tokens, types = _tokens(vocabulary, added, num_rows, model.get("unk_token"))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    scores: list[float] = []
    pre, prefix = "default", None
    if model.get("byte_fallback"):
        scores = _scores(model["merges"], tokens)
        merges, prefix = [], _adds_space(data)
    else:
        pre, warned = _pre_tokenizer(data, model)
        warnings += warned
    ids = {kind: getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "unk", "sep", "pad", "mask")}
    special = {kind: token for kind, token in ids.items() if token is not None and token < num_rows}
    add_bos, add_eos = _adds_ends(tokenizer)
    template = tokenizer.chat_template
    return TokenizerData(
        "llama" if model.get("byte_fallback") else "gpt2",
        pre,
        tokens,
        types,
        scores,
        merges,
        special,
        add_bos,
        add_eos,
        prefix,
        template.get("default") if isinstance(template, dict) else template,
        warnings,
    )


def _too_many(vocabulary: dict[str, int], num_rows: int) -> tuple[str, ...]:
    num_more = sum(token >= num_rows for token in vocabulary.values())
    if not num_more:
        return ()
    return (f"{num_more} token(s) of the tokenizer have no row in the embedding and are omitted from the GGUF file.",)


def _tokens(
    vocabulary: dict[str, int], added: dict[str, Any], num_rows: int, unknown: str | None
) -> tuple[list[str], list[int]]:
    """Return the text and type of every row; rows without a token are unused."""
    tokens = [f"[PAD{index}]" for index in range(num_rows)]
    types = [UNUSED] * num_rows
    for text, index in vocabulary.items():
        if index >= num_rows:
            continue
        tokens[index], types[index] = text, BYTE if _BYTE.fullmatch(text) else NORMAL
        if text == unknown:
            types[index] = UNKNOWN
        elif text in added and (added[text]["special"] or _SPECIAL.fullmatch(text)):
            types[index] = CONTROL
        elif text in added:
            tokens[index], types[index] = text.replace("▁", " "), USER_DEFINED
    return tokens, types


def _scores(merges: Sequence[str | Sequence[str]], tokens: list[str]) -> list[float]:
    """Return a score for each token: minus the rank of its merge.

    Sentencepiece joins the pair whose token has the best score, BPE the pair that comes first.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
    return [-float(ranks[text]) if text in ranks else NO_MERGE for text in tokens]


def _pre_tokenizer(data: dict[str, Any], model: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return llama.cpp's name of the rules that split a text before BPE, and warnings."""
    steps = data.get("pre_tokenizer") or {}
    cuts = []
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "Split":
            cuts.append(step["pattern"].get("Regex", step["pattern"]))
        elif step.get("type") == "Digits":
            cuts.append("digits" if step.get("individual_digits") else "numbers")
        elif step.get("type") == "ByteLevel":
            cuts += ["words"] if step.get("use_regex", True) else []
        else:
            cuts.append(step.get("type"))
    name = PRE_TOKENIZERS.get(tuple(map(str, cuts)))
    if name == "llama-bpe" and not model.get("ignore_merges"):
        name = "dbrx"  # the same cuts, but a whole word that is a token is not taken unsplit
    if name is not None:
        spaced = any(step.get("add_prefix_space") for step in steps.get("pretokenizers", [steps]))
        return name, (
            f"llama.cpp does not put a space before a text, but this model's tokenizer does ({name}).",
        ) * spaced
    message = (
        "llama.cpp may split texts into other tokens than in training: this tokenizer's rule for splitting words "
        f"({', '.join(map(repr, cuts)) or 'not at all'}) has no known name in GGUF."
    )
    return "default", (message,)


def _adds_space(data: dict[str, Any]) -> bool:
    """Return True if a text gets a leading space before it is split."""
    normalizer, splitter = data.get("normalizer") or {}, data.get("pre_tokenizer") or {}
    prepends = any(step.get("type") == "Prepend" for step in normalizer.get("normalizers", [normalizer]))
    return prepends or (splitter.get("type") == "Metaspace" and splitter.get("prepend_scheme", "always") != "never")


def _adds_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Return whether the tokenizer adds a first and a last token to a text, found by trying it."""
    plain, ended = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (False, True))
    return (
        len(ended) > len(plain) and ended[0] == tokenizer.bos_token_id,
        len(ended) > len(plain) and ended[-1] == tokenizer.eos_token_id,
    )
