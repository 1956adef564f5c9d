"""Ids sort by age and look like a UUID version 7."""

import time
import uuid

from api.store.ids import new_id


def test_ids_are_uuid7_and_sort_by_age() -> None:
    before = time.time_ns() // 1_000_000
    ids = []
    for _ in range(5):
        ids.append(new_id("job"))
        time.sleep(0.002)
    assert ids == sorted(ids)
    assert len(set(ids)) == 5
    for name in ids:
        prefix, digits = name.split("_")
        parsed = uuid.UUID(hex=digits)
        assert (prefix, len(digits), parsed.version, parsed.variant) == ("job", 32, 7, uuid.RFC_4122)
        assert before <= parsed.int >> 80 <= before + 60_000
