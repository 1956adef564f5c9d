"""The proof of a job in the process of the test."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def prove_here(task: Any, folder: Path, expected: Any, emit: Any) -> Any:
    from quantcore.engine.pipeline.tiny_export import export_twin
    from quantcore.engine.runtime.devices import peak_memory_bytes
    from quantcore.engine.verification.fresh_process import Proved
    from quantcore.engine.verification.verify import prove_all

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
        patch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", prove_here)
        yield
