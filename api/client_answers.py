"""Writes the answers of the Python client from the OpenAPI document: ``python -m api.client_answers``.

``make openapi`` runs it. A class per schema of ``ANSWERS``, frozen, with the schema's descriptions as docstrings. Other
schemas and words of an enumeration are not classes there, but JSON data and ``str``: a newer service may say more. A
field that can be null is None by default, a list or an object empty, so that an older service may leave it out; of
others the document may name a default.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.openapi import app_of_nothing

CLIENT = Path(__file__).parents[1] / "bitfoundry" / "client"
ANSWERS = {
    "answers": {
        "ProgressOut": "Progress",
        "FailureOut": "JobError",
        "ArtifactOut": "ArtifactRef",
        "PhaseOut": "Phase",
        "AllocationOut": "Allocation",
        "PublicationOut": "Publication",
        "Answer": "ChatAnswer",
        "TurnOut": "ChatTurn",
        "WorstLayer": "WorstLayer",
        "MixSummary": "MixSummary",
        "GoalSummary": "GoalSummary",
        "ExportSummary": "ExportSummary",
        "Step": "Step",
        "Verdict": "Verdict",
        "Summary": "JobSummary",
        "JobOut": "Job",
        "EventOut": "Event",
        "FileOut": "ArtifactFile",
        "LogLineOut": "LogLine",
        "SummaryOut": "Summary",
        "DatasetOut": "Dataset",
        "PreviewRow": "PreviewRow",
        "EstimateOut": "Estimate",
        "InspectionOut": "Inspection",
        "KeptTensor": "KeptTensor",
        "PlanOut": "Plan",
    },
    "model_answers": {
        "Interval": "Interval",
        "PairedChange": "PairedChange",
        "ChangeOut": "ResultChange",
        "RecipeOut": "Recipe",
        "ResultBrief": "BriefResult",
        "PublicationBrief": "BriefPublication",
        "ResultOut": "Result",
        "ParentOut": "ParentResult",
        "ModelOut": "UsedModel",
        "ResultPage": "ModelResults",
        "SweepBrief": "BriefSweep",
        "SweepOut": "Sweep",
        "FolderOut": "ModelFolder",
        "FolderList": "ModelFolders",
        "Actor": "Actor",
        "AliasOut": "ModelAlias",
        "RegisteredModelOut": "RegisteredModel",
        "RegistryVersionOut": "ModelVersion",
        "AliasRequestOut": "AliasRequest",
    },
    "project_answers": {
        "MemberRef": "MemberRef",
        "NewKeyOut": "Key",
        "NewMemberOut": "Member",
        "ProjectOut": "Project",
        "QuotaOut": "QuotaUse",
        "HubTokenOut": "HubToken",
        "WorkerOut": "Worker",
        "AuditEntryOut": "AuditEntry",
        "NewWebhookOut": "Webhook",
        "DeliveryOut": "Delivery",
        "NewShareOut": "Share",
        "PolicyOut": "RetentionPolicy",
        "DueOut": "DueJob",
        "DueList": "DueJobs",
        "ChatOut": "Chat",
    },
}
"""Module of the client -> schema -> class, each after those that it refers to."""
BASES = {
    "JobOut": "JobBase",
    "PlanOut": "Mapped",
    "PublicationOut": "PublicationBase",
    "RegistryVersionOut": "BriefResult",
    "ResultOut": "BriefResult",
    "Summary": "SummaryBase",
    "WorstLayer": "WorstLayerBase",
}
"""Schema -> base of its class, if that is not ``Answer``: it adds what no schema has (``bitfoundry.client.answer``)."""
SHOWN_ONCE = {
    "NewKeyOut": "KeyOut",
    "NewMemberOut": "MemberOut",
    "NewShareOut": "ShareOut",
    "NewWebhookOut": "WebhookOut",
}
"""Schema of the answer to a creation -> that of later answers, which lacks its secret. Both are one class."""
AGAIN = ("FINAL_STATES", "Answer", "ChatEvent")
"""Names of ``bitfoundry.client.answer`` that are answers, too, for those who import them."""
OF_A_PAGE = ("has_more", "next_cursor")
"""Fields that the client reads for its callers, when it joins the pages of a list."""
SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
WIDTH = 120


@dataclass(frozen=True)
class Module:
    """A module of the client, made from the schemas of the OpenAPI document."""

    name: str
    schemas: Mapping[str, Any]

    @property
    def text(self) -> str:
        classes = "\n\n\n".join(map(self._class, ANSWERS[self.name]))
        lines = ['"""Answers of the service as frozen values, made by `make openapi` (api/client_answers.py)."""', ""]
        if re.search(r"\bAny\b", classes):
            lines += ["from typing import Any", ""]
        if "Field(" in classes:
            lines += ["from pydantic import Field", ""]
        again = AGAIN if self.name == "answers" else ()
        lines += [f"from bitfoundry.client.answer import {name} as {name}" for name in again]
        lines += self._imports("answer", {"Answer", *BASES.values()} - _NAMES.keys() - {*again}, classes)
        for other in sorted(ANSWERS.keys() - {self.name}):
            lines += self._imports(other, set(ANSWERS[other].values()), classes)
        return "\n".join([*lines, "", "", classes, ""])

    def _imports(self, module: str, names: Iterable[str], text: str) -> list[str]:
        """Return the import of those ``names`` of a module of the client that ``text`` needs."""
        used = sorted(name for name in names if re.search(rf"[(:\[ ]{name}\b", text))
        return [f"from bitfoundry.client.{module} import {', '.join(used)}"] if used else []

    def _class(self, name: str) -> str:
        schema, base = self.schemas[name], BASES.get(name, "Answer")
        left_out = {*self.schemas[_NAMES[base]]["properties"]} if base in _NAMES else set()
        left_out |= {*OF_A_PAGE} if {*OF_A_PAGE} <= schema["properties"].keys() else set()
        later = self.schemas[SHOWN_ONCE[name]]["properties"] if name in SHOWN_ONCE else schema["properties"]
        lines = [f"class {ANSWERS[self.name][name]}({base}):", *_docstring(schema["description"]), ""]
        for field, about in schema["properties"].items():
            if field in left_out:
                continue
            kind = self._type(about) if field in later else f"{self._type(about)} | None"
            lines.append(f"    {field}: {kind}{_default(about, kind)}")
            words = self._words(about) if field in later else "Shown once: None in later answers."
            lines += _docstring(about.get("description", words))
        return "\n".join(lines)

    def _words(self, schema: Mapping[str, Any]) -> str:
        """Return the words of an enumeration as a sentence; '' for another schema."""
        options = schema.get("anyOf", [schema])
        words = [f"`{word}`" for option in options for word in self._referred(option).get("enum", ())]
        return f"{', '.join(words[:-1])} or {words[-1]}." if words else ""

    def _referred(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.schemas[_name(schema)] if "$ref" in schema else schema
        return found

    def _type(self, schema: Mapping[str, Any]) -> str:
        if "anyOf" in schema:
            return " | ".join(dict.fromkeys(self._type(option) for option in schema["anyOf"]))
        if "$ref" in schema:
            known = {name: answer for answer, name in _NAMES.items()}
            known |= {later: known[name] for name, later in SHOWN_ONCE.items()}
            return known.get(_name(schema)) or self._type({**self._referred(schema), "additionalProperties": True})
        kind = schema.get("type")
        if kind == "array":
            return f"list[{self._type(schema['items'])}]"
        if kind == "object":
            values = schema.get("additionalProperties")
            return f"dict[str, {self._type(values) if isinstance(values, dict) else 'Any'}]"
        return SCALARS[kind] if kind else "Any"


_NAMES = {answer: schema for answers in ANSWERS.values() for schema, answer in answers.items()}


def _name(reference: Mapping[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _default(schema: Mapping[str, Any], kind: str) -> str:
    if kind.endswith("None"):
        return " = None"
    if kind.startswith(("list", "dict")):
        return f" = Field(default={'[]' if kind.startswith('list') else '{}'})"
    if "default" not in schema:
        return ""
    value = schema["default"]
    return f" = {json.dumps(value) if isinstance(value, str) else repr(value)}"


def _docstring(text: str) -> list[str]:
    """Return the lines of a docstring in a class; none for no text."""
    text = re.sub(r"\b[Nn]ull\b", "None", text).replace("``", "`")
    paragraphs = text.split("\n") if "\n" in text else textwrap.wrap(text, WIDTH - len('    """"""'))
    if len(paragraphs) < 2:
        return [f'    """{text}"""'] if text else []
    return [f'    """{paragraphs[0]}', *(f"    {line}".rstrip() for line in paragraphs[1:]), '    """']


def modules() -> dict[Path, str]:
    """Return the path and the text of each module."""
    schemas = app_of_nothing().openapi()["components"]["schemas"]
    return {CLIENT / f"{name}.py": Module(name, schemas).text for name in ANSWERS}


if __name__ == "__main__":
    for path, text in modules().items():
        path.write_text(text, "utf-8")
