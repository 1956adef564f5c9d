"""What accelerators a machine says it has."""

import os
from pathlib import Path

import pytest

from quantcore.plan import this_machine


def test_lines_of_nvidia_smi() -> None:
    said = "NVIDIA H100 80GB HBM3, 81559, 1024\nA card, with a comma, 1024, [N/A]\nbroken, [N/A], 3\n\n"
    assert this_machine.parse_nvidia(said) == [
        {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 81559 << 20, "used_bytes": 1 << 30},
        {"kind": "cuda", "name": "A card, with a comma", "memory_bytes": 1 << 30, "used_bytes": None},
    ]


def test_a_driver_that_fails_is_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for script, number in (("echo 'A card, 10, 5'", 1), ("echo no driver; exit 9", 0)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert len(this_machine._nvidia()) == number


def test_the_files_of_amdgpu(tmp_path: Path) -> None:
    for card, memory, name in (("card0", "17163091968\n", "Radeon"), ("card1", "x", "broken"), ("card2", "1024", None)):
        folder = tmp_path / card / "device"
        folder.mkdir(parents=True)
        (folder / "mem_info_vram_total").write_text(memory)
        if name:
            (folder / "product_name").write_text(f"{name}\n")
            (folder / "mem_info_vram_used").write_text("4096\n")
    (tmp_path / "card0-DP-1" / "device").mkdir(parents=True)
    assert this_machine._amd(tmp_path) == [
        {"kind": "rocm", "name": "Radeon", "memory_bytes": 17163091968, "used_bytes": 4096},
        {"kind": "rocm", "name": "AMD GPU", "memory_bytes": 1024, "used_bytes": None},
    ]
    assert this_machine._amd(tmp_path / "nothing") == []
