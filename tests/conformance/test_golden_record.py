"""No refactoring changes a byte of what jobs write: see ``golden_record``."""

import json
import platform

import pytest

from tests.conformance import golden_record

USUAL = [
    "dense int8_autosmoothquant",
    "mixture w4a16_awq_gptq",
    "tied mxfp4_rotation_gptaq",
    "fused w4a16_file2file",
]
"""The cells that run with ``make test``, which meet every family and most algorithms."""

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the record was made with kernels for x86-64"
)


@pytest.fixture(scope="module")
def record():
    return json.loads(golden_record.RECORD.read_text())[golden_record.MAKER]


def test_the_record_holds_every_cell(record):
    assert list(record) == golden_record.names()


def test_usual_cells_write_the_same_files(record):
    found = golden_record.run(USUAL, num_ranks=1)
    assert recorded(found, record) == {name: record[name] for name in USUAL}


def recorded(cells, record):
    """Leave out what changed on purpose and awaits a run on a processor of this maker. Every other file is compared.

    ``golden_record.awaits`` names it: reports, which also follow the table of other programs, and files of some cells.
    """
    assert all(golden_record.awaits(name, path) for name in cells for path in cells[name].keys() - record[name].keys())
    return {name: {path: files[path] for path in files if path in record[name]} for name, files in cells.items()}


def test_a_record_lacks_nothing_but_what_awaits_a_processor():
    records = json.loads(golden_record.RECORD.read_text())
    for name in golden_record.names():
        apart = records["intel"][name].keys() ^ records["other"][name].keys()
        assert all(golden_record.awaits(name, path) for path in apart), (name, apart)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_cells_write_the_same_files_on_any_number_of_ranks(record, num_ranks):
    assert recorded(golden_record.run(golden_record.names(), num_ranks), record) == record
