"""Pydantic's errors as entries of a problem."""

from typing import Literal

import pytest
from pydantic import BaseModel, ValidationError

from api.http.errors import entry_of


class Body(BaseModel):
    gate: Literal["off", "warn", "fail"]


def test_allowed_is_a_list_of_values() -> None:
    with pytest.raises(ValidationError) as caught:
        Body.model_validate({"gate": "maybe"})
    (problem,) = caught.value.errors()
    entry = entry_of({**problem, "loc": ("body", *problem["loc"])})
    assert (entry["pointer"], entry["allowed"]) == ("#/gate", ["off", "warn", "fail"])
    assert "allowed" not in entry_of({"type": "missing", "loc": ("body", "gate"), "msg": "required"})
