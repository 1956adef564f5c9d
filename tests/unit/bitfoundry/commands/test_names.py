"""An id is found by its start, by the name of what has it, and as `last`."""

from types import SimpleNamespace as Row
from typing import Any

import pytest

from bitfoundry.commands.names import LISTS, find_id
from bitfoundry.errors import BitfoundryError

KEYS = [
    Row(id="0123456789ab", name="nightly", created_at="2026-01-02"),
    Row(id="0199999999ab", name="laptop", created_at="2026-01-03"),
    Row(id="ffffffffffff", name="laptop", created_at="2026-01-01"),
]
HOOKS = [Row(id="whk_" + 32 * "a", created_at="2026-01-01"), Row(id="whk_" + 32 * "b", created_at="2026-01-02")]

SWEEPS = [Row(id="swp_" + 32 * digit, name=name, created_at=digit) for digit, name in (("2", "nightly"), ("1", None))]


class Client:
    sweeps = staticmethod(lambda: SWEEPS)
    webhooks = Row(list=lambda: HOOKS)
    account = Row(keys=lambda: KEYS)

    @staticmethod
    def find(text: str) -> Any:
        return Row(id=f"job of {text}")


@pytest.mark.parametrize(
    ("argument", "text", "found"),
    [
        ("key_id", "nightly", "0123456789ab"),
        ("key_id", "0199", "0199999999ab"),
        ("key_id", "last", "0199999999ab"),
        ("key_id", "aaaaaaaaaaaa", "aaaaaaaaaaaa"),  # a whole id: whether there is one is for the service to say
        ("webhook_id", "whk_aa", HOOKS[0].id),
        ("webhook_id", "bb", HOOKS[1].id),
        ("webhook_id", "last", HOOKS[1].id),
        ("job_id", "nightly", "job of nightly"),
        ("sweep_id", "nightly", SWEEPS[0].id),
        ("sweep_id", "swp_1", SWEEPS[1].id),
        ("sweep_id", "last", SWEEPS[0].id),
    ],
)
def test_an_id_is_found(argument: str, text: str, found: str) -> None:
    client: Any = Client()
    assert find_id(client, argument, text) == found


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("none", "not_found", "`bitfoundry keys list`"),
        ("", "not_found", "`bitfoundry keys list`"),
        ("laptop", "not_unique", "0199999999ab (laptop), ffffffffffff (laptop)"),
        ("01", "not_unique", "0123456789ab (nightly), 0199999999ab (laptop)"),
    ],
)
def test_what_is_none_or_several_is_refused(text: str, code: str, part: str) -> None:
    client: Any = Client()
    with pytest.raises(BitfoundryError) as refusal:
        find_id(client, "key_id", text)
    assert refusal.value.code == code and part in refusal.value.message + refusal.value.hint


def test_the_hint_for_sweeps_is_a_command_that_there_is() -> None:
    client: Any = Client()
    with pytest.raises(BitfoundryError) as refusal:
        find_id(client, "sweep_id", "none")
    assert refusal.value.hint == "`bitfoundry sweep list` shows ids and names."


def test_every_group_with_ids_is_in_the_list() -> None:
    from bitfoundry.commands import account, datasets, jobs, members, registry, webhooks

    arguments = {
        name
        for commands in (
            *(group for _, group in account.GROUPS.values()), datasets.COMMANDS, members.COMMANDS, webhooks.COMMANDS,
            registry.COMMANDS, jobs.SWEEP_COMMANDS,
        )
        for command in commands.values()
        for name in command.__annotations__
        if name.endswith("_id")
    }  # fmt: skip
    assert arguments - {"object_id", "delivery_id", "job_id"} == {*LISTS}
