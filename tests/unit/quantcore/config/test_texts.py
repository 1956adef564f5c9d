"""Several sources of a text: how a flag names them, how they are checked, how many windows each gives."""

import pytest

from quantcore.config.job_spec import Evaluation
from quantcore.config.texts import CalibrationConfig, apportion, parse_sources
from quantcore.errors import ConfigError

TWO = ({"source": "a", "share": 3.0}, {"source": "b"})

FLAGS = {
    "builtin": {"source": "builtin"},
    "C:/rows.jsonl": {"source": "C:/rows.jsonl"},
    "one,two.txt": {"source": "one,two.txt"},
    "C:/rows.jsonl:0.5,org/code:.5": {
        "sources": [{"source": "C:/rows.jsonl", "share": 0.5}, {"source": "org/code", "share": 0.5}]
    },
    "a:3,b:split=test:column=content:1.": {
        "sources": [{"source": "a", "share": 3.0}, {"source": "b", "split": "test", "column": "content", "share": 1.0}]
    },
}


@pytest.mark.parametrize("text", FLAGS)
def test_a_flag_names_one_source_or_several(text):
    assert parse_sources(text) == FLAGS[text]
    CalibrationConfig(**FLAGS[text])


@pytest.mark.parametrize("text", ["a:0.5,b", "a,b:0.5", "a:0.5,", "a:0,b:1", ":1,b:0.5"])
def test_every_one_of_several_has_a_share(text):
    with pytest.raises(ConfigError, match="with a share above 0") as caught:
        parse_sources(text)
    assert caught.value.code == "invalid_sources" and "chats.jsonl:0.75" in caught.value.hint


def test_one_source_is_stored_as_ever_and_several_without_the_fields_of_one():
    assert "sources" not in CalibrationConfig().model_dump()
    several = CalibrationConfig(sources=TWO, num_samples=6)
    stored = several.model_dump(mode="json", exclude_none=True)
    assert stored == {
        "sources": [{"source": "a", "share": 3.0}, {"source": "b", "share": 1.0}],
        "num_samples": 6, "seq_len": 512, "seed": 0,
    }  # fmt: skip
    assert CalibrationConfig.model_validate(stored) == several
    assert several.counts == [5, 1] and [part.source for part in several.parts] == ["a", "b"]
    assert CalibrationConfig(source="a", column="c").parts[0].place == {
        "source": "a", "config": None, "split": None, "revision": None, "column": "c",
    }  # fmt: skip


BAD = {
    "both": ({"source": "c"}, "source set together with sources"),
    "a column beside": ({"column": "c"}, "column set together with sources"),
    "none": ({"sources": (), "source": None}, "add a source"),
    "twice": ({"sources": ({"source": "a"}, {"source": "a", "share": 2})}, "'a' is listed twice"),
    "no window": ({"sources": ({"source": "a"}, {"source": "b", "share": 0.01})}, "'b' gets none of the 32 samples"),
    "no share": ({"sources": ({"source": "a", "share": 0},)}, "greater than 0"),
    "endless": ({"sources": ({"source": "a", "share": float("inf")},)}, "finite number"),
    "a file's split": (
        {"sources": ({"source": "/a.txt", "split": "test"},)},
        "set for '/a.txt', which is not a dataset",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_sources_that_make_no_sense_are_refused(case):
    fields, fault = BAD[case]
    with pytest.raises(ConfigError, match=fault):
        CalibrationConfig(**{"sources": TWO, **fields})


def test_the_template_takes_scalars_under_names_of_its_own():
    said = CalibrationConfig(chat_template_kwargs={"enable_thinking": False, "effort": "low", "budget": 3, "t": 0.5})
    assert CalibrationConfig.model_validate(said.model_dump(mode="json")) == said
    assert "chat_template_kwargs" not in CalibrationConfig().model_dump()
    for wrong in ({"tokenize": True}, {"a b": 1}, {"x": None}, {"x": [1]}):
        with pytest.raises(ConfigError, match="chat_template_kwargs"):
            CalibrationConfig(chat_template_kwargs=wrong)
    with pytest.raises(ConfigError, match="need a source"):
        Evaluation(chat_template_kwargs={"enable_thinking": False})


def test_whole_numbers_of_windows_add_up():
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(32, [0.75, 0.25]) == [24, 8]
    assert apportion(7, [0.1, 0.2, 0.7]) == [1, 1, 5]  # exact: 0.7, 1.4, 4.9
    assert apportion(32, [1e308, 1e308]) == [16, 16]  # whose sum is beyond floats
    assert apportion(2, [5e-324, 5e-324]) == [1, 1] and apportion(2, [0.0, 0.0]) == [1, 1]
    assert all(sum(apportion(total, [0.3, 0.3, 0.4])) == total for total in range(200))
