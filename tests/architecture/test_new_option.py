"""A new option of a job is one field of ``JobOptions``: API, command line, lease and task follow from it."""

import json
import subprocess
import sys

from bitfoundry.client import bodies
from quantcore.config.job_spec import JobOptions
from tests.support.sources import ROOT

SCRIPT = """
import importlib.util, json, sys

FIELD = '''
    an_option: Annotated[StrictInt, Field(ge=0, description="An option that only this test knows.")] = 3
'''
spec = importlib.util.find_spec("quantcore.config.job_spec")
source = open(spec.origin).read()
head, end, rest = source.partition("\\n    calibration: CalibrationConfig = CalibrationConfig()\\n")
assert end
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
exec(compile(head + FIELD + end + rest, spec.origin, "exec"), module.__dict__)

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


def test_a_new_option_is_one_field() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "api": ["JobCreate", "PlanCreate", "JobOut"],
        "clone": True,
        "help": [True, True],
        "request": {"config": {"preset": "fp8"}, "an_option": 7},
        "lease": 7,
        "task": 7,
    }


def test_the_python_client_takes_every_option() -> None:
    assert set(bodies.JobOptions.__annotations__) == {*JobOptions.model_fields, "effort"}  # of a request alone
