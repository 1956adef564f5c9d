"""A new option of a job is one field of ``JobOptions``: API, command line, lease and task follow from it.

So is a new change to a preset one of ``PresetChanges``: requests, command line and the dashboard's form follow.
"""

import json
import subprocess
import sys
from typing import Any

from bitfoundry.client import bodies
from quantcore.config.job_spec import JobOptions
from tests.support.sources import ROOT

LOADER = """
import importlib.util, json, sys

def load(name, change):
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(change(open(spec.origin).read()), spec.origin, "exec"), module.__dict__)
    return module

def before(place, text):
    def change(source):
        head, end, rest = source.partition(place)
        assert end
        return head + text + end + rest
    return change
"""
OPTION = """
load("quantcore.config.job_spec", before("\\n    calibration: CalibrationConfig = CalibrationConfig()\\n", '''
    an_option: Annotated[StrictInt, Field(ge=0, description="An option that only this test knows.")] = 3
'''))

from api.openapi import app_of_nothing
from api.store.queue.leases import Lease
from bitfoundry.commands.submission import _add_job, _flags
from quantcore.cli.flags import parser
from quantcore.cli.from_flags import request_of, task_of
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec

schemas = app_of_nothing().openapi()["components"]["schemas"]
flags = _flags("submit", "")
_add_job(flags)
line = ["--quant_scheme", "fp8", "--an-option", "7"]
stored = JobSpec(config=presets.resolve("fp8"), an_option=7).to_dict()
task = task_of(parser().parse_args(["--model_dir", "/", "--output_dir", "/out", *line]))
print(json.dumps({
    "api": [name for name in ("JobCreate", "PlanCreate", "JobOut") if "an_option" in schemas[name]["properties"]],
    "clone": "an_option" in schemas["JobClone"]["properties"],
    "help": ["An option that only this test knows." in shown.format_help() for shown in (flags, parser())],
    "request": request_of(flags.parse_args(line), flags.given(line)),
    "lease": Lease("job", 1, 1, "project", {}, stored, 1, None).spec.an_option,
    "task": task.an_option,
}))
"""


def _result_of(script: str) -> Any:
    ran = subprocess.run([sys.executable, "-c", LOADER + script], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_new_option_is_one_field() -> None:
    assert _result_of(OPTION) == {
        "api": ["JobCreate", "PlanCreate", "JobOut"],
        "clone": True,
        "help": [True, True],
        "request": {"config": {"preset": "fp8"}, "an_option": 7},
        "lease": 7,
        "task": 7,
    }


CHANGE = """
import quantcore.config as config

config.presets = load("quantcore.config.presets", lambda source: before("\\n    def apply(self", '''
    a_change: int | None = _change(None, "A change", flag="--a_change_of_it", about="only this test knows it")
''')(source).replace("        if self.group_size is not None:\\n", '''
        if self.a_change is not None:
            return replace(config, exclude=(f"{self.a_change} changed it",))
        if self.group_size is not None:
'''))

from api.jobs import service
from bitfoundry.commands.submission import _add_job, _flags
from quantcore.cli.flags import parser
from quantcore.cli.from_flags import request_of, task_of
from quantcore.config import changes_schema
from quantcore.errors import QuantError

flags = _flags("submit", "")
_add_job(flags)
line = ["--quant_scheme", "fp8", "--a-change-of-it", "7"]
request = request_of(flags.parse_args(line), flags.given(line))
try:
    service._parse_config({"preset": "fp8", "no_change": 7}, config.presets.PRESETS)
except QuantError as error:
    hint = error.hint
print(json.dumps({
    "help": ["only this test knows it" in shown.format_help() for shown in (flags, parser())],
    "request": request,
    "task": task_of(parser().parse_args(["--model_dir", "/", "--output_dir", "/out", *line])).config.exclude,
    "api": service._parse_config(request["config"], config.presets.PRESETS)[1].exclude,
    "hint": "a_change" in hint,
    "form": json.loads(changes_schema.document())["properties"]["a_change"]["title"],
}))
"""


def test_a_new_change_to_a_preset_is_one_field_and_its_step() -> None:
    assert _result_of(CHANGE) == {
        "help": [True, True],
        "request": {"config": {"preset": "fp8", "a_change": 7}},
        "task": ["7 changed it"],
        "api": ["7 changed it"],
        "hint": True,
        "form": "A change",
    }


def test_the_python_client_takes_every_option() -> None:
    assert set(bodies.JobOptions.__annotations__) == {*JobOptions.model_fields, "effort"}  # of a request alone
