"""Reads the weights of a model with an adapter merged into them, one tensor at a time, as PEFT merges them.

The arithmetic is that of PEFT's ``merge_and_unload``, which loads the matrices of an adapter in float32: the product is
computed on the CPU in float32, added to the weight in float32, and rounded once to the dtype of the weight (of an
embedding, the product is rounded as well). LoRA: arXiv 2106.09685; DoRA: arXiv 2402.09353.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quantcore.checkpoint.adapter import Adapter, Change, LowRank
from quantcore.errors import NumericsError
from quantcore.tensors.source import Rows, Source, rows_of


class MergingSource(Source):
    """Reads the tensors of ``base``, those that ``adapter`` changes with the change."""

    def __init__(self, base: Source, adapter: Adapter) -> None:
        super().__init__(adapter.folder, base.tensors)
        self._base, self._changes = base, adapter.changes
        self._adapter = Source(adapter.folder, adapter.tensors)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor ``name``, merged. Raises NumericsError if it is not finite."""
        tensor = self._base.read(name)
        change = self._changes.get(name)
        if change is None:
            return tensor
        changed = self._changed(tensor, change)
        if not bool(torch.isfinite(changed).all()):
            raise NumericsError(
                f"'{name}' holds NaN or infinity once the adapter is merged into it.",
                code="adapter_not_finite",
                hint="The adapter is damaged, or too large for the dtype of the model's files.",
            )
        return changed

    def read_rows(self, name: str, rows: range) -> torch.Tensor:
        if name in self._changes:
            return self.read(name)[rows.start : rows.stop]
        return self._base.read_rows(name, rows)

    def rows(self, name: str) -> Rows:
        return rows_of(self.read(name)) if name in self._changes else self._base.rows(name)

    def expect(self, names: Iterable[str]) -> None:
        self._base.expect(names)

    def _changed(self, tensor: torch.Tensor, change: Change) -> torch.Tensor:
        if change.replaced_by is not None:
            tensor = self._adapter.read(change.replaced_by).to(tensor.dtype)
        if change.low_rank is not None:
            tensor = self._merged(tensor, change.low_rank)
        if change.added is not None:
            vector, factor = change.added
            tensor = (tensor + self._wide(vector, tensor) * factor).to(tensor.dtype)
        return tensor

    def _merged(self, weight: torch.Tensor, change: LowRank) -> torch.Tensor:
        """Return ``weight`` [O, I] with the product of the matrices added, and for DoRA its rows scaled."""
        delta = self._wide(change.b, weight) @ self._wide(change.a, weight)
        turned = change.is_transposed or change.is_embedding
        delta = (delta.T if turned else delta) * change.scaling
        if change.is_embedding:
            return weight + delta.to(weight.dtype)
        merged = weight + delta
        if change.magnitude is not None:
            norm = torch.linalg.norm(merged.T if turned else merged, dim=1)
            factor = (self._wide(change.magnitude, weight) / norm).view(-1, 1)
            merged = (factor.T if turned else factor) * merged
        return merged.to(weight.dtype)

    def _wide(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Read a tensor of the adapter, in float32 or in the wider dtype of ``weight``."""
        return self._adapter.read(name).to(torch.promote_types(weight.dtype, torch.float32))
