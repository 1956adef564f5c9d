"""The outcome of a quality gate. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quantcore.report.quality import Number, Record

Status = Literal["pass", "warn", "fail", "skipped"]


class GateResult(Record):
    """The outcome of a gate: the measured ``value``, its ``limit``, and a sentence for people."""

    gate: Annotated[str, Field(pattern=r"^G[0-9]+$")]
    name: str
    status: Status
    value: Number | None
    limit: Number | None
    detail: str

    @property
    def sentence(self) -> str:
        """The outcome of a gate with a limit, such as "Top-1 agreement 60.2 % is below the 85 % limit (of fp8)."."""
        title = _TITLES.get(self.name, self.name.replace("_", " ").capitalize())
        assert self.limit is not None
        limit = f"the {self._shown(self.limit)} limit ({self.detail})."
        if self.value is None or self.value != self.value:
            return f"{title} is not a number, so it misses {limit}"
        return f"{title} {self._shown(self.value)} is {'above' if self.value > self.limit else 'below'} {limit}"

    def _shown(self, number: float) -> str:
        if self.name in _SHARES:
            return f"{100 * number:.3g} %"
        return f"{number:.3g} dB" if self.name == "layer_sqnr_db" else f"{number:.3g}"


_TITLES = {
    "finite_numbers": "Number of invalid scales",
    "calibration_coverage": "Number of layers with too few calibration tokens",
    "layers_never_called": "Number of layers that calibration never reached",
    "expert_coverage": "Number of experts with too few calibration tokens",
    "layer_sqnr_db": "Lowest SQNR of a weight",
    "not_worse_than_rounding": "Output error relative to plain rounding",
    "fallbacks": "Share of layers with a fallback",
    "clipping": "Share of clipped activations",
    "folding": "Change by folding scales",
    "round_trip": "Relative difference of the logits read back",
    "kl_mean": "Mean KL divergence",
    "top1_agreement": "Top-1 agreement",
    "generation": "Share of degenerate samples",
    "side_files": "Number of differing tokenizer files",
    "overlap": "Overlap of calibration and evaluation text",
    "provenance": "Number of missing provenance fields",
    "size": "Difference from the planned size",
    "recovery": "Recovery",
}
_SHARES = {"top1_agreement", "fallbacks", "clipping", "generation", "overlap", "size", "recovery"}
