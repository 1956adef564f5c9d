"""Documents stored JSON with the type that its writer gave it."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class SchemaOf:
    """Annotation of JSON data that is passed on as it is stored, with the JSON schema of ``model``.

    The data is not validated: an older or a newer engine may have written it with other fields.
    """

    model: type[BaseModel]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # among definitions it gets a name in the document, and is not written out at each place
        return handler(core_schema.definitions_schema(self.model.__pydantic_core_schema__, definitions=[]))
