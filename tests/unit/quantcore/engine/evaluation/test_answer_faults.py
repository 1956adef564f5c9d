"""Faults of answers: real ones are found in all their forms, and ordinary answers have none."""

from __future__ import annotations

import pytest

from quantcore.engine.evaluation.answer_faults import (
    Answered,
    Asked,
    faults_of,
    final_number,
    has_call,
    has_json,
    is_answer,
    is_thinking,
    language_of,
    repeats,
    switches_language,
    without_thinking,
)

STEPS = " ".join(f"Step {n}: Add {2 * n} cups of flour and mix for {3 * n} minutes." for n in range(1, 12))
YEARS = "\n".join(f"In {1900 + n}, the city had a population of {n * 1371 % 977} people." for n in range(9))
SENTENCE = "The Moon is also made of a special thing called a rock called a planet called Earth. " * 5
WORDS = "def group(words):\n    return " + "{word.upper(): " * 20
RECIPE = (
    "Here is a simple fried rice:\n\n1. Cook 200 g of rice and let it cool down.\n2. Cut one carrot into small cubes "
    "and fry them in 2 tablespoons of oil for 5 minutes.\n3. Push them aside, add 2 beaten eggs and stir until they "
    "are firm.\n4. Add the rice and 3 tablespoons of soy sauce, and fry everything for 4 more minutes.\n\nServe it hot."
)
TABLE = '[{"city": "Tokyo", "population_millions": 37.4}, {"city": "Delhi", "population_millions": 31.2}, ' + (
    '{"city": "Shanghai", "population_millions": 27.8}, {"city": "Cairo", "population_millions": 21.3}]'
)
MULTIPLES = f"These are {', '.join(str(4 * n) for n in range(1, 60))}. Their sum is 7080."
PROSE = (
    "A virus is much smaller than a bacterium and cannot live without a host. A bacterium is a cell of its own that "
    "feeds and divides. Antibiotics kill bacteria, but they have no effect on a virus, so a doctor first finds out "
    "which of the two causes an illness. Against some viruses there are vaccines, or medicines that slow them down."
)
CHINESE_LOOP = "长城是中国古代的伟大建筑。" * 6


@pytest.mark.parametrize(
    "text", [STEPS, YEARS, SENTENCE, WORDS, CHINESE_LOOP, "ha " * 40, "-" * 200, "Yes.\n" + "\n" * 99]
)
def test_a_loop_is_found_also_with_changing_numbers(text: str) -> None:
    assert repeats(text) and repeats(f"{PROSE} {text}")


@pytest.mark.parametrize("text", [RECIPE, TABLE, MULTIPLES, PROSE, "", "Paris.", "10 + 10 = 20", "Yes, yes, yes!"])
def test_an_ordinary_answer_is_no_loop(text: str) -> None:
    assert not repeats(text)


@pytest.mark.parametrize(
    ("text", "is_open", "rest"),
    [
        ("<think>The user wants</think>Paris.", False, "Paris."),
        ("<think>The user wants to know the capital", True, "<think>The user wants to know the capital"),
        ("<think>a</think>Well.<think>b", True, "Well.<think>b"),
        ("[THINK]a[/THINK]Paris.", False, "Paris."),
        ("<|channel|>analysis<|message|>It is", True, "<|channel|>analysis<|message|>It is"),
        ("Paris.", False, "Paris."),
    ],
)
def test_thinking_that_does_not_close(text: str, is_open: bool, rest: str) -> None:
    assert is_thinking(text) is is_open and without_thinking(text) == rest


def test_thinking_that_the_prompt_began() -> None:
    assert is_thinking("The user wants", thinks=True) and not is_thinking("The user</think>Paris.", thinks=True)


FILM = {"type": "object", "required": ["title", "year"], "properties": {"year": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"title": "Alien", "year": 1979}', True),
        ('Here it is:\n\n```json\n{"title": "Alien", "year": 1979}\n```\nIt is a classic [of its kind].', True),
        ('Sure! {"title": "Alien", "year": 1979} is one.', True),
        ('{"title": "Alien", "year": "1979"}', False),
        ('{"title": "Alien"}', False),
        ('{"title": "Alien", "year": 1979, "cast": ["Weaver", "Hurt"], }', False),
        ("{'title': 'Alien', 'year': 1979}", False),
        ('{"title": "Alien", "year": 1979', False),
        ("The film is Alien, of 1979.", False),
        ("[" * 100_000, False),
    ],
)
def test_json_and_its_schema(text: str, is_valid: bool) -> None:
    assert has_json(text, FILM) is is_valid


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Hamburg"}}\n</tool_call>', True),
        ('<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Hamburg"}}', True),
        ('{"type": "function", "function": {"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}', True),
        ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Hamburg"}}]', True),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Hamburg"}', True),
        ('<function=get_weather>{"city": "Hamburg"}</function>', True),
        ("<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>", True),
        ("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>", True),
        ('[get_weather(city="Hamburg", day="tomorrow (Monday)")]', True),
        ('<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>', True),
        ('<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Oslo"}\n```', True),
        ('<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}', True),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Hamburg"\n</tool_call>', False),
        ('<tool_call>\n{"name": "get_wether", "arguments": {"city": "Hamburg"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "get_weather"}\n</tool_call>', False),
        ("I would use get_weather to look it up.", False),
        ('[get_weather("Hamburg"', False),
        ("You will not need an umbrella.", False),
    ],
)
def test_tool_calls_in_the_usual_notations(text: str, is_valid: bool) -> None:
    assert has_call(text, ["get_weather", "get_forecast"]) is is_valid


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 pens cost 2.40, so 11 pens cost 8.80 euros.", 8.8),
        ("Das macht 8,80 Euro.", 8.8),
        ("It is 1,234,567.5 in all", 1234567.5),
        ("Das sind 1.234.567 Euro", 1234567),
        ("about 12,500 people", 12500),
        ("\\boxed{-480}", -480),
        ("I do not know.", None),
    ],
)
def test_the_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == number


def test_the_right_answer_is_recognized() -> None:
    assert is_answer("11 pens cost 8,80 euros", "8.8") and not is_answer("They cost 8.80 euros for 11", "8.8")
    assert is_answer("First I thought of Rome.\nThe answer is **Paris**.", "paris") and not is_answer("Parish", "Paris")
    assert not is_answer("", "Paris")


GERMAN = "Schreibe eine höfliche E-Mail, in der du den Termin und die Besprechung auf nächste Woche verschiebst."

ENGLISH = "It is a trip for you and the whole team, to all of the places that we did not see in the last year."


@pytest.mark.parametrize(
    ("asked", "text", "switches"),
    [
        (GERMAN, "Sehr geehrte Frau Weber, leider ist es mir nicht möglich, und ich bitte Sie um einen Termin.", False),
        (GERMAN, "Dear Ms Weber, it is not possible for me to come this week, and I hope that you are well.", True),
        (GERMAN, "Sehr geehrte Frau Weber, leider muss ich 我们的会议 verschieben.", True),
        (GERMAN, "Der Termin und die Fahrt, für die das Team ist, sind nicht auf den 3. Mai. " * 2 + ENGLISH, True),
        ("What is the area?", "The area is πr², so it is 3.14 for the circle of that size.", False),
        ("请用三句话介绍一下长城。", "长城是中国古代的建筑，英文是 the Great Wall。", True),
        ("日本の四季について、短く説明してください。", "春は桜が咲きます。夏は暑いです。", False),
        ("¿Qué es?", "Es un animal.", False),
    ],
)
def test_a_language_that_switches(asked: str, text: str, switches: bool) -> None:
    assert switches_language(asked, text) is switches


def test_languages_are_told_by_their_usual_words() -> None:
    assert language_of("Le réfrigérateur est une machine qui garde les aliments dans le froid") == "French"
    assert language_of("Berlin, Hamburg, 2025") is None


def test_only_what_applies_is_judged() -> None:
    cut = Answered('{"a": ', 64, is_ended=False)
    asked = Asked("json", "Give me JSON.", tools=("f",), schema={}, answer="1")
    assert faults_of(asked, cut) == {"endless": True, "loop": False, "other_language": False}
    whole = faults_of(asked, Answered("I have 2.", 5, is_ended=True))
    assert {name for name, is_fault in whole.items() if is_fault} == {"invalid_json", "invalid_call", "wrong_answer"}
    assert faults_of(Asked("code", "Write the function"), Answered("der die das und", 3, True)) == {
        "endless": False, "loop": False,
    }  # fmt: skip
    assert faults_of(Asked("chat", "", thinks=True), Answered("Well", 3, True))["open_thinking"]
