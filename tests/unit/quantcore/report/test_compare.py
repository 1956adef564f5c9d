"""Results side by side: the front by its definition, and what cannot be compared is said."""

import itertools
import json
import random

import pytest

from quantcore.cli import main as cli
from quantcore.errors import ConfigError
from quantcore.report.compare import compare, pareto_front
from tests.support import reports


def write(folder, size, kl, model="sha256:a", text="t", windows=None):
    folder.mkdir(parents=True)
    report = reports.report(size=size, kl=kl, model=model, text=text)
    report["quality"] |= {} if windows is None else {"by_window": windows}
    (folder / "report.json").write_text(json.dumps(report))
    return str(folder)


def test_a_table_from_the_smallest_with_its_front(tmp_path, capsys):
    sizes = {"small": (10, 0.5), "beaten": (20, 0.6), "large": (30, 0.1)}
    folders = [write(tmp_path / name, *numbers) for name, numbers in reversed(sizes.items())]
    assert cli.main(["compare", *folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"].rpartition("/")[2] for row in found["rows"]] == list(sizes)
    assert [name.rpartition("/")[2] for name in found["front"]] == ["small", "large"] and not found["warnings"]
    assert (found["rows"][0]["scheme"], found["rows"][0]["num_failed_gates"]) == ("fp8, int8", 1)
    assert cli.main(["compare", *folders]) == 0
    assert capsys.readouterr().out.count("*") == 2


def test_changes_are_from_the_first_result_by_a_paired_test(tmp_path, capsys):
    first, worse = (
        write(tmp_path / name, 10, kl, windows=reports.windows(kl)) for name, kl in [("b", 0.1), ("a", 0.2)]
    )
    old = write(tmp_path / "old", 20, 0.1)
    rows = {row.name: row for row in compare([first, worse, old]).rows}
    assert rows[first].change is None and rows[first].not_tested is None
    assert rows[worse].change.verdict == "worse"
    assert rows[worse].change.kl_change.low > 0.9
    assert "lacks the measurements of each window" in rows[old].not_tested
    assert cli.main(["compare", first, worse, old]) == 0
    shown = capsys.readouterr().out
    assert f"{worse} against {first}: worse, KL +10" in shown
    assert f"{old} against {first}: not tested. The report of one lacks" in shown


def test_the_front_is_what_none_dominates():
    draw = random.Random(0)
    points = [(draw.randrange(6), draw.choice([None, 0.1, 0.2, 0.3])) for _ in range(40)]
    for point, is_front in zip(points, pareto_front(points), strict=True):
        loss = [9.0 if one[1] is None else one[1] for one in (point, *points)]
        others = zip((one[0] for one in points), loss[1:], strict=True)
        better = [o for o in others if o[0] <= point[0] and o[1] <= loss[0] and (o[0] < point[0] or o[1] < loss[0])]
        assert is_front == (not better)
    assert any(pareto_front(points)) and not all(pareto_front(points))


def test_a_job_is_called_by_its_id_and_not_by_the_folder_of_its_artifact(tmp_path):
    job, digest = f"job_{'0a' * 16}", "1f" * 32
    folders = [write(tmp_path / "mine", 1, 0.1), write(tmp_path / "artifacts" / job / digest, 2, 0.1, text="u")]
    found = compare(folders)
    assert {row.name for row in found.rows} == {str(tmp_path / "mine"), job}
    assert found.warnings[0].startswith(f"{job} was measured on a different text")


def test_what_does_not_compare(tmp_path, capsys):
    first = write(tmp_path / "a", 1, 0.1)
    codes = {}
    for name, folder in {
        "not_comparable": write(tmp_path / "b", 1, 0.1, model="sha256:b"),
        "no_report": str(tmp_path),
    }.items():
        with pytest.raises(ConfigError) as caught:
            compare([first, folder])
        codes[name] = caught.value.code
    with pytest.raises(ConfigError, match="There is no result 'typo'"):
        compare([first, "typo"])
    assert all(name == code for name, code in codes.items())
    assert "a different text" in compare([first, write(tmp_path / "c", 1, 0.1, text="u")]).warnings[0]
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    (tmp_path / "a" / "report.json").write_text(json.dumps(report | {"quality": None}))
    assert cli.main(["compare", *itertools.repeat(first, 2)]) == 1
    assert "not_measured" in capsys.readouterr().err
