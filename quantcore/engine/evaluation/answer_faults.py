"""Finds what is wrong with the answers of a chat model, from their texts: no end, loops, invalid JSON and so on.

Each fault is True, False, or not judged: a prompt without tools has no tool calls, and of an answer that was cut off
nobody knows whether its JSON would have been valid. None of these rules is perfect. Both models' answers to a prompt
are judged by the same rules, so what matters is the difference.
"""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantcore.data.json_schema import fits

FAULTS = {
    "endless": "do not end",
    "loop": "repeat themselves",
    "open_thinking": "do not close their thinking",
    "invalid_json": "have no valid JSON",
    "invalid_call": "have no valid tool call",
    "wrong_answer": "have a wrong final answer",
    "other_language": "switch the language",
}
"""The faults, and what is said of answers that have them."""
THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis", "<|channel|>final"),
)
"""Pairs of marks that begin and end a model's thinking."""

LOOP_WORDS = 64
"""Number of words at the end of an answer in which repetition is looked for."""
MIN_LOOP_WORDS = 32
GRAM = 4
LOOP_SHARE = 0.5
"""Share of the phrases of GRAM words that came before, from which an answer is said to repeat itself."""
NOISE_CHARS, MAX_NOISE_SIGNS = 64, 3
"""An answer that ends with so many characters, of which no more differ, repeats itself as well, such as "-----"."""

MIN_LETTERS, MIN_LETTER_SHARE = 4, 0.05
"""Letters of a foreign script that are a switch of language; fewer may be a symbol or a name."""
MIN_STOP_WORDS = 3

_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|\d+|[^\w\s]"
)
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")
_FENCED = re.compile(r"```(?:json|JSON)?\s*\n(.*?)```", re.DOTALL)
_STOP_WORDS = {
    "English": "the and is of to that for with you it are this",
    "German": "der die das und ist nicht ein eine mit für auf den",
    "French": "le les et est des une pour dans qui du vous avec",
    "Spanish": "el los las y es una para con por del pero como",
    "Italian": "il che è per gli della sono nel ma più anche di",
    "Portuguese": "os as e é uma para com não do da mais ao",
    "Dutch": "het een van en dat niet zijn voor met op aan ook",
    "Polish": "i w nie na się jest że do to jak od po",
}
_SCRIPTS = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}


@dataclass(frozen=True)
class Asked:
    """A prompt, as far as its answers are judged by it.

    ``text``: what the user says. ``tools`` are the names of those that may be called, ``schema`` is the JSON Schema of
    the answer, ``answer`` the right final one. ``thinks``: the prompt ends within thinking.
    """

    kind: str
    text: str
    tools: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    answer: str | None = None
    thinks: bool = False


@dataclass(frozen=True)
class Answered:
    """An answer: its text without the token that ends it, the number of tokens, and whether it came to its end."""

    text: str
    num_tokens: int
    is_ended: bool


def faults_of(asked: Asked, answer: Answered) -> dict[str, bool]:
    """Return which of FAULTS an answer has; one that is not judged is missing."""
    final = without_thinking(answer.text)
    found = {"endless": not answer.is_ended, "loop": repeats(answer.text)}
    if asked.thinks or any(begin in answer.text for begin, _ in THINKING):
        found["open_thinking"] = is_thinking(answer.text, asked.thinks)
    if asked.kind != "code":
        found["other_language"] = switches_language(asked.text, final)
    if not answer.is_ended:
        return found
    if asked.schema is not None or asked.kind == "json":
        found["invalid_json"] = not has_json(final, asked.schema or {})
    if asked.tools:
        found["invalid_call"] = not has_call(answer.text, asked.tools)
    if asked.answer is not None:
        found["wrong_answer"] = not is_answer(final, asked.answer)
    return found


def repeats(text: str) -> bool:
    """Return True for a text that ends with a loop, of which the numbers may change ("Step 7: ...", "Step 8: ...").

    At least half of the phrases of four words at its end came before: the measure seq-rep-4 of Welleck et al., Neural
    Text Generation with Unlikelihood Training (2020), on the last words. It is taken twice: of the text as it is, and
    with all numbers alike, then of phrases with two words or more, since a list of numbers repeats nothing.
    """
    if len(text) >= NOISE_CHARS and len(set(text[-NOISE_CHARS:])) <= MAX_NOISE_SIGNS:
        return True
    exact = _WORD.findall(text.lower())
    alike = ["0" if word.isdigit() else word for word in exact if word[0].isalnum()]
    return _repeated(exact, 0) >= LOOP_SHARE or _repeated(alike, 2) >= LOOP_SHARE


def _repeated(words: Sequence[str], min_words: int) -> float:
    """Return the share of the last phrases that came before, of phrases with ``min_words`` that are no numbers."""
    if len(words) < MIN_LOOP_WORDS:
        return 0.0
    first, seen, num, num_repeated = len(words) - LOOP_WORDS, set(), 0, 0
    for start in range(len(words) - GRAM + 1):
        gram = tuple(words[start : start + GRAM])
        if start >= first and sum(word[0].isalpha() for word in gram) >= min_words:
            num += 1
            num_repeated += gram in seen
        seen.add(gram)
    return num_repeated / num if num else 0.0


def is_thinking(text: str, thinks: bool = False) -> bool:
    """Return True for a text that ends within thinking. ``thinks``: the prompt has begun it."""
    begun = max((text.rfind(begin) for begin, _ in THINKING), default=-1)
    ended = max(text.rfind(end) for _, end in THINKING)
    return ended < begun or (thinks and ended < 0)


def without_thinking(text: str) -> str:
    """Return the part of a text behind its thinking; all of it, if there is none."""
    ends = [(text.rfind(end), end) for _, end in THINKING if end in text]
    if not ends:
        return text
    place, end = max(ends)
    return text[place + len(end) :]


def has_json(text: str, schema: Mapping[str, Any]) -> bool:
    """Return True for a text whose JSON can be read and keeps ``schema``.

    It is a block of code, or begins with the first bracket.
    """
    fenced = _FENCED.search(text)
    body = fenced.group(1) if fenced else text[next((at for at, sign in enumerate(text) if sign in "{["), len(text)) :]
    try:
        value, _ = json.JSONDecoder().raw_decode(body.strip())
    except (ValueError, RecursionError):
        return False
    return fits(value, schema)


def has_call(text: str, tools: Sequence[str]) -> bool:
    """Return True for a text with a call of one of the ``tools`` that can be read, in any of the usual notations.

    They are a JSON object with ``name``; the name before a JSON object, with marks such as ``[ARGS]`` between them; a
    call as in Python; and ``<function=name>`` or ``name <arg_key>``, closed by ``</``.
    """
    if any(_names(value, tools) for value in _objects(text)):
        return True
    return any(
        _is_called(text[match.end() :])
        for name in tools
        for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text)
    )


def _objects(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            yield decoder.raw_decode(text, match.start())[0]
        except (ValueError, RecursionError):
            continue


def _names(value: Mapping[str, Any], tools: Sequence[str]) -> bool:
    inner = value.get("function")
    call = inner if isinstance(inner, dict) else value
    arguments = next((call[key] for key in ("arguments", "parameters", "args") if key in call), None)
    if isinstance(arguments, str):
        arguments = next(_objects(arguments), None)
    return call.get("name") in tools and isinstance(arguments, dict)


def _is_called(rest: str) -> bool:
    """Return True if arguments that can be read follow behind the name of a tool."""
    if rest.startswith("("):
        ends = (match.end() for match in re.finditer(r"\)", rest))
        return any(_is_python_call(f"f{rest[:end]}") for end in ends)
    if re.match(r">\s*<parameter=|\s*<arg_key>", rest):
        return "</" in rest
    marks = re.match(r"(?:[>:\d\s]|\[[A-Z_]+\]|<[^<>]*>|```|json|commentary)*(?=\{)", rest)
    if marks is None:
        return False
    try:
        return isinstance(json.JSONDecoder().raw_decode(rest, marks.end())[0], dict)
    except (ValueError, RecursionError):
        return False


def _is_python_call(source: str) -> bool:
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(call, ast.Call) and not call.args


def final_number(text: str) -> float | None:
    """Return the last number in a text: ``8.8`` of "they cost 8,80 euros"; None without a number."""
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _value(number: str) -> float:
    """Return a number with points or commas: the last sign is the decimal one, unless it groups thousands."""
    signs = [sign for sign in number if sign in ".,"]
    is_grouped = bool(signs) and len(number) - number.rfind(signs[-1]) == 4 and (signs[-1] == "," or len(signs) > 1)
    if not signs or (is_grouped and len(set(signs)) == 1):
        return float(re.sub("[.,]", "", number))
    whole, _, part = number.rpartition(signs[-1])
    return float(f"{re.sub('[.,]', '', whole)}.{part}")


def is_answer(text: str, answer: str) -> bool:
    """Return True for a text whose last number is ``answer``; for an answer in words, whose last line has it."""
    if _NUMBER.fullmatch(answer.strip()):
        found = final_number(text)
        return found is not None and math.isclose(found, _value(answer.strip()), rel_tol=1e-6, abs_tol=1e-9)
    lines = text.strip().splitlines()
    return bool(lines) and re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", lines[-1], re.IGNORECASE) is not None


def switches_language(asked: str, text: str) -> bool:
    """Return True for an answer with letters of a script, or the words of a language, that the prompt does not have."""
    scripts = _scripts(text)
    least = max(MIN_LETTERS, MIN_LETTER_SHARE * scripts.total())
    if {script for script, num in scripts.items() if num >= least} - _scripts(asked).keys():
        return True
    languages = {language_of(part) for part in (text, text[len(text) // 2 :])} - {None}
    expected = language_of(asked)
    return expected is not None and bool(languages - {expected})


def _scripts(text: str) -> Counter[str]:
    names = (unicodedata.name(char, "").split(" ")[0] for char in text if char.isalpha())
    return Counter(_SCRIPTS.get(name, name) for name in names)


def language_of(text: str) -> str | None:
    """Return the language whose most usual words a text has, if no other one has half as many; else None."""
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    hits = Counter({name: sum(words[word] for word in common.split()) for name, common in _STOP_WORDS.items()})
    (name, most), (_, second) = hits.most_common(2)
    return name if most >= MIN_STOP_WORDS and most > 2 * second else None
