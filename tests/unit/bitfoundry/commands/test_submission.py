"""A request names an uploaded dataset by its id, however it was called on the command line."""

from types import SimpleNamespace as Row
from typing import Any

import pytest

from bitfoundry.commands.submission import COMMANDS, _with_datasets
from bitfoundry.errors import BitfoundryError

CHATS, TWINS = "ds_" + 32 * "a", ["ds_" + 32 * "b", "ds_" + 32 * "c"]
ROWS = [Row(id=CHATS, name="support chats"), *(Row(id=each, name="twin") for each in TWINS)]


class Client:
    def __init__(self) -> None:
        self.num_asked = 0
        self.datasets = Row(list=self._list)

    def _list(self) -> list[Row]:
        self.num_asked += 1
        return ROWS


@pytest.mark.parametrize("text", ["support chats", CHATS, "aaaa"])
def test_a_dataset_is_found_by_any_of_its_names(text: str) -> None:
    client: Any = Client()
    body = {"calibration": {"sources": [{"source": text}, {"source": "builtin"}]}, "evaluation": {"source": text}}
    found = _with_datasets(client, body)
    assert found["calibration"]["sources"] == [{"source": CHATS}, {"source": "builtin"}]
    assert found["evaluation"] == {"source": CHATS}


@pytest.mark.parametrize("text", ["builtin", "wikitext", "/data/chats.jsonl", "org/chats"])
def test_other_texts_are_not_looked_up(text: str) -> None:
    client: Any = Client()
    assert _with_datasets(client, {"calibration": {"source": text}}) == {"calibration": {"source": text}}
    assert client.num_asked == 0


def test_a_name_of_none_is_for_the_service_and_one_of_several_is_refused() -> None:
    client: Any = Client()
    assert _with_datasets(client, {"calibration": {"source": "none"}}) == {"calibration": {"source": "none"}}
    with pytest.raises(BitfoundryError, match="twin") as refusal:
        _with_datasets(client, {"calibration": {"source": "twin"}})
    assert refusal.value.code == "not_unique"
    assert _with_datasets(client, {}) == {}


@pytest.mark.parametrize("command", ["submit", "plan", "clone"])
def test_the_service_says_that_it_merges_no_adapters(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        COMMANDS[command](["MODEL", "w4a16", "--adapter", "./style"])
    said = " ".join(capsys.readouterr().err.split())
    assert "does not merge adapters. Merge it on this machine: bitfoundry quantize MODEL --adapter ./style" in said
