"""The proof of a job in the process of the test."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def prove_here(task: Any, folder: Path, expected: Any, emit: Any) -> Any:
    from quantcore.pipeline.twin_export import export_twin
    from quantcore.proof.fresh_process import Proved
    from quantcore.proof.verify import prove_all
    from quantcore.runtime.devices import peak_memory_bytes

    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        # A fresh process belongs to no group. In one, compressed-tensors would wait for ranks that prove nothing.
        patch.setattr("torch.distributed.is_initialized", lambda: False)
        expected.move_to(Path(scratch))
        proofs = {proof.export: proof for proof in prove_all(task, folder, Path(scratch), emit, export_twin)}
    return Proved(proofs, peak_memory_bytes())


@contextmanager
def proving_here() -> Iterator[None]:
    """Let proofs of jobs run here, with the same result: starting a fresh interpreter takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantcore.pipeline.job.prove_in_fresh_process", prove_here)
        yield
