"""Chat templates are strangers' programs: what they make is used, what they try is stopped."""

import time
from typing import Any

import pytest

from quantcore.engine.data import chat_template
from quantcore.engine.data.chat_template import chat_renderer, unread_arguments
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
    "too long": "x" * (chat_template.MAX_TEMPLATE_CHARS + 1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_template_tries_is_stopped(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.5)
    started = time.monotonic()
    with pytest.raises(CalibrationError) as caught:
        render(HOSTILE[case])
    assert caught.value.code == "bad_chat_template"
    assert time.monotonic() - started < 60  # some of these would take hours
    assert render("{{ messages[0].content }}") == "hello"  # the limits are gone


def test_processes_of_several_templates_end_in_any_order() -> None:
    """Each fork has the connections of those before it: an earlier one would not see that its own is closed."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    try:
        first, second, third = (chat_renderer(tokenizer, {}) for _ in range(3))
        assert [render(MESSAGES) for render in (first, second, third)] == ["hello"] * 3
        del first
        assert second(MESSAGES) == "hello"
        del third, second
    finally:
        tokenizer.chat_template = None


def test_messages_that_the_template_does_not_know() -> None:
    with pytest.raises(CalibrationError, match="cannot render"):
        render("{{ messages[0].content + 1 }}")


def test_a_model_without_a_template() -> None:
    with pytest.raises(CalibrationError) as caught:
        render(None)
    assert caught.value.code == "no_chat_template"


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CHATML = "{% for one in messages %}<{{ one['role'] }}>{{ one['content'] + eos_token }}{% endfor %}"  # SmolLM2's way
PRINTS = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
PARTS = (
    "{% for one in messages %}{% if one.content is string %}{{ one.content }}{% else %}"
    "{% for part in one.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
KNOWS_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for one in messages %}<{{ one.role }}>{{ one.content }}"
    "{% for call in one.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text"), [(CHATML, "<user>one\ntwo<eos>"), (PRINTS, "<user>one\ntwo"), (PARTS, "[one][two]")]
)
@pytest.mark.parametrize("parts", [["one", "two"], [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]])
def test_parts_of_text_are_read_by_any_template(template: str, text: str, parts: list[Any]) -> None:
    """A template that takes texts alone fails, or prints the list as Python does: then it gets one text."""
    assert render(template, [{"role": "user", "content": parts}]) == text


@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_no_content_beside_a_call_is_an_empty_text(message: dict[str, Any]) -> None:
    chat_with_call = [{"role": "assistant", "tool_calls": [CALL], **message}]
    assert render(KNOWS_TOOLS, chat_with_call) == "<assistant>Paris"


def test_tools_that_the_template_never_reads_are_refused() -> None:
    with pytest.raises(CalibrationError, match="never reads tool_calls") as caught:
        render(PRINTS, [{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert caught.value.code == "no_tools"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = PRINTS
    try:
        with pytest.raises(CalibrationError, match="never reads tools"):
            chat_renderer(tokenizer, {})(MESSAGES, TOOLS)
        tokenizer.chat_template = KNOWS_TOOLS
        assert '"name": "weather"' in chat_renderer(tokenizer, {})(MESSAGES, TOOLS)
    finally:
        tokenizer.chat_template = None
