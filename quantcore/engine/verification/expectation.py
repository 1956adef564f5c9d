"""Records the results of the pipeline, so that a fresh process can compare the files with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.runtime.vocabulary import Vocabulary, common_parts
from quantcore.errors import ProofError
from quantcore.plan.workload import PROBE_POSITIONS

LOGIT_TOLERANCE = 1e-3
"""Upper bound on the largest |difference| of a logit over the largest |logit|. Same weights and kernels give 0."""


@dataclass
class ExpectedDigests:
    """Digests of every tensor, and the logits of the quantized model in memory.

    ``weights``: sha256 of each quantized layer's dequantized float32 weight; ``plain_weights``: of the same in the
    dtype and layout of the checkpoint, by the tensor's name, if a format stores that; ``activations``: the static
    scales and zero points of its input and output; ``tensors``: sha256 of every other tensor as it is written;
    ``kept``: sha256 of those that a format returns with other, equivalent values; ``probe_logits``
    [N, PROBE_POSITIONS, V] float32 for the first N windows of ``held_out``; ``original_states_NTH`` are the float
    model's after its last block, None if nothing is measured; ``model`` is that model's identity;
    ``calibration_first``: the first tokens of the calibration windows, each once.
    """

    held_out: EvaluationText
    probe_logits: torch.Tensor
    original_states_NTH: torch.Tensor | None = None
    model: str = ""
    calibration_first: tuple[int, ...] = ()
    weights: dict[str, str] = field(default_factory=dict)
    plain_weights: dict[str, str] = field(default_factory=dict)
    activations: dict[str, list[list[float]]] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def digests(self) -> dict[str, dict[str, Any]]:
        """All fields but the tensors."""
        return {name: value for name, value in vars(self).items() if isinstance(value, dict)}

    def take(self, digests: dict[str, dict[str, Any]]) -> None:
        """Add the digests of another rank."""
        for name, values in digests.items():
            getattr(self, name).update(values)

    def take_probe_logits(self) -> torch.Tensor:
        """Return ``probe_logits``, which are compared once, and keep them no longer: they may be large."""
        taken, self.probe_logits = self.probe_logits, torch.empty(0)
        return taken

    def move_to(self, folder: Path) -> None:
        """Move everything into files in ``folder``: the logits and states are in memory no longer."""
        tensors = {
            "held_out": self.held_out.ids_NT,
            "first_scored": self.held_out.first_N,
            "targets": self.held_out.targets_NP,
            "strata": self.held_out.strata_N,
            "probe_logits": self.take_probe_logits(),
            "original_states": self.original_states_NTH,
        }
        for window, media in enumerate(self.held_out.media):
            tensors |= {f"media.{window}.{name}": value.contiguous() for name, value in media.items()}
        counts = {"num_words": self.held_out.num_words, "num_bytes": self.held_out.num_bytes}
        record = {"digests": self.digests, "counts": counts, "model": self.model, "first": self.calibration_first}
        stored = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(stored, folder / "expected.safetensors")
        self.original_states_NTH = None
        (folder / "expected.json").write_text(json.dumps(record), "utf-8")

    @classmethod
    def load(cls, folder: Path) -> ExpectedDigests:
        tensors = load_file(folder / "expected.safetensors")
        record = json.loads((folder / "expected.json").read_text("utf-8"))
        texts = (tensors["held_out"], tensors["first_scored"])
        media: list[dict[str, torch.Tensor]] = [{} for _ in range(len(tensors["held_out"]))]
        for name, tensor in tensors.items():
            if name.startswith("media."):
                _, window, own = name.split(".", 2)
                media[int(window)][own] = tensor
        held_out = EvaluationText(
            *texts,
            **record["counts"],
            targets_NP=tensors.get("targets"),
            media=tuple(media) if any(media) else (),
            strata_N=tensors.get("strata"),
        )
        states = tensors.get("original_states")
        first = tuple(record["first"])
        return cls(held_out, tensors["probe_logits"], states, record["model"], first, **record["digests"])


def probe_logits(vocabulary: Vocabulary, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return logits [N, PROBE_POSITIONS, V] of the last positions of N windows, float32 on the CPU.

    They are computed in the same parts in both processes: other shapes of a product may round otherwise.
    """
    parts = []
    for tokens in common_parts(vocabulary):
        with vocabulary.part(tokens) as logits:
            parts.append(torch.stack([logits(state[:, -PROBE_POSITIONS:])[0].float().cpu() for state in states]))
    return torch.cat(parts, -1)


def difference_of_probes(vocabulary: Vocabulary, states: Sequence[torch.Tensor], expected: torch.Tensor) -> float:
    """Return the largest difference of a logit from the ``expected`` ones [N, P, V], over the largest logit.

    Raises ProofError if it is too large.
    """
    probes = probe_logits(vocabulary, states[: len(expected)])
    difference = float(probes.sub_(expected).abs_().max() / expected.abs().max())
    if not difference <= LOGIT_TOLERANCE:
        raise ProofError(
            f"The files produce different logits than the model in memory: relative difference {difference:.2e}.",
            code="proof_logits_differ",
            hint=f"The limit is {LOGIT_TOLERANCE:.0e}. The artifact was withheld. Please report this as a bug.",
        )
    return difference
