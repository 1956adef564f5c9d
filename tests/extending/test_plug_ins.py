"""Packages that declare entry points: broken ones, names that are taken, and what the engine's process sees of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic.dataclasses import dataclass

from quantcore.config.algorithms import ALGORITHMS, TransformConfig, config_of
from quantcore.engine.solvers.per_layer import register_solver
from quantcore.engine.transforms import SMOOTHINGS
from quantcore.errors import ConfigError
from tests.support.packages import declare, run_python, write_files

FORMAT = 'from quantcore.formats import IntFormat\nINT7 = IntFormat("int7", 7, signed=True)\n'
LIST = """
from quantcore.config.quantization import parse_config
from quantcore.errors import QuantError
from quantcore.export import EXPORTERS
from quantcore.formats import FORMATS
print(" ".join([*FORMATS, *EXPORTERS]))
def weight(dtype):
    try:
        return parse_config({"global_quant_config": {"weight": {"dtype": dtype}}}).global_quant_config.weight.dtype
    except QuantError as error:
        return f"{error.code}: {error}"
"""


def test_a_broken_package_is_named_and_stops_no_other(tmp_path: Path) -> None:
    write_files(tmp_path, {"good.py": FORMAT, "bad.py": "import no_such_module\n", "odd.py": "INT7 = 7\n"})
    declare(tmp_path, "a-bad-one", "bitfoundry.formats", {"int9": "bad:INT9"})
    declare(tmp_path, "b-odd-one", "bitfoundry.formats", {"int11": "odd:INT7", "int12": "good:INT7"})
    declare(tmp_path, "good-one", "bitfoundry.formats", {"int7": "good:INT7"})
    ran = run_python(tmp_path, "-c", f"{LIST}\nfor name in ('int7', 'int9', 'int11', 'int12'): print(weight(name))")
    assert ran.returncode == 0, ran.stderr
    names, int7, int9, int11, int12 = ran.stdout.splitlines()
    assert "int7" in names.split() and not {"int9", "int11", "int12"} & {*names.split()}
    assert int7 == "int7"
    assert int9.startswith("broken_plug_in: 'int9' of the installed package a-bad-one 1.0 cannot be used: No module")
    assert "pip uninstall a-bad-one" in int9
    assert "b-odd-one 1.0 cannot be used: it is a int, not an IntFormat" in int11
    assert "b-odd-one 1.0 cannot be used: the name of the format is 'int7'" in int12
    assert "Traceback" not in ran.stderr and ran.stderr.count("a-bad-one 1.0") == 1  # and the log says it once


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    exporter = "from quantcore.export.fake_quantized import FakeQuantizedExporter\nMINE = FakeQuantizedExporter()\n"
    int4 = FORMAT.replace("int7", "int4")
    write_files(tmp_path, {"mine.py": exporter, "int4.py": int4, "first.py": FORMAT, "second.py": "INT7 = None\n"})
    declare(tmp_path, "mine", "bitfoundry.exporters", {"fake_quantized": "mine:MINE"})
    declare(tmp_path, "four", "bitfoundry.formats", {"int4": "int4:INT7"})
    declare(tmp_path, "a-first", "bitfoundry.formats", {"int7": "first:INT7"})
    declare(tmp_path, "b-second", "bitfoundry.formats", {"int7": "second:INT7"})
    code = "print(FORMATS['int4'].bits, FORMATS['int7'].bits, EXPORTERS.get('fake_quantized').__module__)"
    ran = run_python(tmp_path, "-c", f"{LIST}\n{code}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "4 7 quantcore.export.fake_quantized"
    for package in ("mine 1.0 cannot be used: the export_format 'fake_quantized' exists already",
                    "four 1.0 cannot be used: the dtype 'int4' exists already",
                    "b-second 1.0 cannot be used: the package a-first 1.0 already uses that name"):  # fmt: skip
        assert package in ran.stderr, ran.stderr


def test_the_confined_engine_finds_packages(tmp_path: Path) -> None:
    """With the environment and the rules that the worker gives an engine; the package's folder is in PYTHONPATH."""
    packages, job = tmp_path / "packages", tmp_path / "data" / "job"
    job.mkdir(parents=True)
    write_files(packages, {"good.py": FORMAT})
    declare(packages, "good-one", "bitfoundry.formats", {"int7": "good:INT7"})
    code = f"""
import subprocess, sys
from pathlib import Path
from api.settings import Settings
from api.confinement import reach_of
from worker.engine import engine_environment
settings = Settings(database_url="postgresql+psycopg://x@/x", broker_url="memory://", data_dir={str(job.parent)!r})
reach = reach_of(settings, Path({str(job)!r}), {{}}, with_hub=False)
command = reach.command([sys.executable, "-c", "from quantcore import Dtype; print(Dtype('int7'))"])
environment = engine_environment(settings) | reach.environment()
print(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
"""
    ran = run_python(packages, "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["int7"]


def test_a_function_is_an_algorithm() -> None:
    @register_solver("zeros_for_a_test", gram=True)
    def zeros(weight_OI, params, spec, stats, *, share: float = 0.5):  # type: ignore[no-untyped-def]
        """Makes zeros."""

    config = config_of("zeros_for_a_test")
    assert (config.share, config.num_grams, type(config).__doc__) == (0.5, 1, "Makes zeros.")
    with pytest.raises(ConfigError, match="it must be a number"):
        type(config)(share="much")
    register_solver("zeros_for_a_test")(zeros)  # as when a cell of a notebook runs again
    assert config_of("zeros_for_a_test").num_grams == 0
    with pytest.raises(ConfigError, match="'gptq' exists already"):
        register_solver("gptq")(zeros)
    with pytest.raises(ConfigError, match="cannot be used"):

        @register_solver("no_default_for_a_test")
        def no_default(weight_OI, params, spec, stats, *, share: float):  # type: ignore[no-untyped-def]
            pass


def test_an_added_transform_is_made_of_its_options() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Nothing(TransformConfig):
        name: Literal["nothing_for_a_test"] = "nothing_for_a_test"

        def create(self) -> str:
            return "made"

    ALGORITHMS.put("nothing_for_a_test", Nothing)
    assert SMOOTHINGS.get("nothing_for_a_test")(config_of("nothing_for_a_test")) == "made"
