"""Files that workers and nodes share: whole or not there, through no link, and read on from where one was."""

from pathlib import Path

from worker.shared_files import Tail, write_whole


def test_a_link_that_an_engine_has_left_is_not_followed(tmp_path: Path, monkeypatch) -> None:
    """It can guess the name of what is written first."""
    victim, target = tmp_path / "victim", tmp_path / "task.json"
    victim.write_text("somebody's")
    monkeypatch.setattr("worker.shared_files.os.getpid", lambda: 7)
    (tmp_path / "task.json.7").symlink_to(victim)
    target.symlink_to(victim)
    write_whole(target, "{}")
    assert (target.read_text(), target.is_symlink(), victim.read_text()) == ("{}", False, "somebody's")
    assert target.stat().st_mode & 0o777 == 0o600 and len(list(tmp_path.iterdir())) == 2


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    file = tmp_path / "events"
    tail = Tail(file)
    assert list(tail.lines()) == []
    file.write_bytes(b"one\ntwo")
    assert list(tail.lines()) == [b"one\n"]
    file.write_bytes(b"one\ntwo\nthree\n")
    assert list(tail.lines()) == [b"two\n", b"three\n"]
    assert list(Tail(file, tail.position).lines()) == []
