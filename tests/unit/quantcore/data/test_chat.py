"""Chat templates are strangers' programs: what they make is used, what they try is stopped."""

import time
from typing import Any

import pytest

from quantcore.data import chat
from quantcore.data.chat import chat_renderer, unread_arguments
from quantcore.errors import CalibrationError
from tests.support.models import tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "bye"}]


def render(template: str | None, messages: list[dict[str, Any]] = MESSAGES, **arguments: Any) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    try:
        return chat_renderer(tokenizer, arguments)(messages)
    finally:
        tokenizer.chat_template = None


def test_the_template_makes_the_text() -> None:
    template = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{{ eos_token }}{% endfor %}"
    assert render(template) == "<user>hello<eos><assistant>bye<eos>"


def test_the_template_gets_its_arguments() -> None:
    template = "{% if enable_thinking is false %}no thoughts{% else %}hm{% endif %}"
    assert render(template) == "hm" and render(template, enable_thinking=False) == "no thoughts"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    try:
        assert unread_arguments(tokenizer, {"enable_thinking": False, "thinking": True}) == ["thinking"]
    finally:
        tokenizer.chat_template = None


HOSTILE = {
    "memory": "{{ 'x' * 10**10 }}",
    "a loop without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a huge range": "{% for a in range(10**9) %}x{% endfor %}",
    "a power that is computed while it is compiled": "{{ 7 ** (9 ** 9) }}",
    "a power of a loop": "{% for a in range(1, 99) %}{{ a ** (9 ** 9) }}{% endfor %}",
    "attributes": "{{ ''.__class__.__mro__ }}",
    "an error of its own": "{{ raise_exception('roles must alternate') }}",
    "broken": "{% for %}",
    "too long": "x" * (chat.MAX_TEMPLATE_CHARS + 1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_template_tries_is_stopped(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    started = time.monotonic()
    with pytest.raises(CalibrationError) as caught:
        render(HOSTILE[case])
    assert caught.value.code == "bad_chat_template"
    assert time.monotonic() - started < 60  # some of these would take hours
    assert render("{{ messages[0].content }}") == "hello"  # the limits are gone


def test_messages_that_the_template_does_not_know() -> None:
    with pytest.raises(CalibrationError, match="cannot render"):
        render("{{ messages[0].content + 1 }}")


def test_a_model_without_a_template() -> None:
    with pytest.raises(CalibrationError) as caught:
        render(None)
    assert caught.value.code == "no_chat_template"
