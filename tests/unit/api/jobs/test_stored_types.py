"""The documented types of JSON that the engine writes have the fields that it writes."""

from dataclasses import fields

from api.jobs.stored_types import FailureOut, ProgressOut
from api.store.queue.leases import Failure
from quantcore import events


def test_progress_is_the_engines_event() -> None:
    assert ProgressOut.model_fields.keys() == {field.name for field in fields(events.Progress)}


def test_a_failure_is_what_ended_the_attempt() -> None:
    whole = Failure(
        "it_failed", "It failed.", hint="Retry it.", retryable=True, detail="...", rank=1, block=2
    ).to_dict()
    assert FailureOut.model_validate(whole).model_dump() == whole
    short = Failure("it_failed", "It failed.").to_dict()
    assert FailureOut.model_validate(short).model_dump(exclude_none=True) == short
