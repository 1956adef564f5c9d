"""What counts as a JSON body."""

import json

import pytest

from api.http.strict_json import MAX_DEPTH, parse


def nest(depth: int) -> bytes:
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


@pytest.mark.parametrize(
    "body", [b"{}", b'{"a": [1, "\\u00e9", null]}', b'{"a": "\\ud83d\\ude00"}', b'"x"', nest(MAX_DEPTH)]
)
def test_plain_json_passes(body: bytes) -> None:
    assert parse(body) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1, "a": 1}',
        b'{"b": {"a": 1, "a": 1}}',
        b'["\\u0000"]',
        b'{"\\u0000": 1}',
        b'{"a": "\\udc00"}',
        b'"\xff"',
        nest(MAX_DEPTH + 1),
        nest(100_000),
    ],
    ids=lambda body: body[:20].decode("latin-1"),
)
def test_the_rest_does_not(body: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse(body)
