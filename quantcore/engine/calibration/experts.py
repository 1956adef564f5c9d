"""Handles experts that saw few calibration tokens, or none: they take the ranges of all experts beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

from quantcore.checkpoint.experts import EXPERT
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.calibration.expert_token_topup import EXPERT_SHARE, MIN_TOKENS
from quantcore.engine.calibration.ranges import Watched
from quantcore.engine.observers import Observer
from quantcore.errors import CalibrationError
from quantcore.events import LayerQuantized, Warned


def share_ranges(watched: Mapping[LayerPlan, Watched]) -> tuple[dict[LayerPlan, Watched], list[Warned]]:
    """Return the observers to use instead of ``watched``, and a warning for each mixture where that makes a difference.

    A layer of an expert with fewer than ``MIN_TOKENS`` tokens takes what all experts of its block saw at the same
    projection (and with the same config): their inputs are alike, and a range that is too wide costs precision where
    one that is too narrow clips. Raises CalibrationError for a layer without tokens and without such siblings.
    """
    siblings: dict[tuple[object, ...], list[LayerPlan]] = {}
    poor: dict[str, dict[int, int]] = {}
    for layer in watched:
        if match := EXPERT.match(layer.name):
            siblings.setdefault((match["moe"], match["projection"], layer.config), []).append(layer)
            if (count := num_tokens(layer, watched[layer])) < MIN_TOKENS:
                poor.setdefault(match["moe"], {})[int(match["index"])] = count
    shared = dict(watched)
    for layers in siblings.values():
        few = [layer for layer in layers if num_tokens(layer, watched[layer]) < MIN_TOKENS]
        if few:
            together = Watched(
                _merged([watched[layer].inputs for layer in layers]),
                _merged([watched[layer].outputs for layer in layers]),
            )
            shared |= dict.fromkeys(few, together)
    for layer, observers in shared.items():
        if num_tokens(layer, observers) == 0:
            raise _unseen(layer)
    return shared, [_warning(moe, counts, _SHARED) for moe, counts in poor.items()]


def _unseen(layer: LayerPlan) -> CalibrationError:
    """Return the error for a static activation without calibration data."""
    if EXPERT.match(layer.name):
        return CalibrationError(
            f"No token of the calibration text reached {layer.name} or any other expert of its block.",
            code="layer_saw_no_token",
            hint="Use more calibration text, quantize its input dynamically, or exclude the layer.",
            field="/calibration/num_samples",
        )
    return CalibrationError(
        f"The model never called {layer.name} on the calibration text, so its input has no range.",
        code="layer_never_called",
        hint="Exclude it. Some models read a weight without calling its layer (Mamba's dt_proj); then more text "
        "does not help.",
        field="/config/exclude",
    )


def num_tokens(layer: LayerPlan, watched: Watched) -> int:
    """Return how many tokens ``layer`` saw."""
    if watched.inputs is not None:
        return watched.inputs.num_values // layer.in_features
    return 0 if watched.outputs is None else watched.outputs.num_values // layer.out_features


def _merged(observers: list[Observer | None]) -> Observer | None:
    seen = [observer for observer in observers if observer is not None]
    if not seen:
        return None
    merged = deepcopy(seen[0])
    for observer in seen[1:]:
        merged.merge(observer)
    return merged


def too_few_tokens(seen: Mapping[LayerPlan, int]) -> list[Warned]:
    """Return warnings for layers that saw fewer than ``MIN_TOKENS`` tokens: one per mixture, or per other layer."""
    poor: dict[str, dict[int, int]] = {}
    warnings = []
    for layer, count in seen.items():
        if count >= MIN_TOKENS:
            continue
        if match := EXPERT.match(layer.name):
            poor.setdefault(match["moe"], {})[int(match["index"])] = count
        elif count == 0:
            warnings.append(
                Warned(
                    "layer_never_called",
                    f"The model never called {layer.name} on the calibration text: {_ALONE} Some models read a "
                    "layer's weight without calling the layer; exclude it to keep it in float.",
                )
            )
        else:
            warnings.append(
                Warned(
                    "layer_saw_few_tokens",
                    f"{layer.name} saw {count} calibration token(s), fewer than {MIN_TOKENS}: {_ALONE}",
                )
            )
    return warnings + [_warning(moe, counts, _ALONE) for moe, counts in poor.items()]


def hardly_seen(layers: Sequence[LayerQuantized]) -> list[str]:
    """Return the names of experts' layers that saw fewer than ``EXPERT_SHARE`` of the tokens."""
    most = max((layer.num_tokens or 0 for layer in layers), default=0)
    experts = (layer for layer in layers if EXPERT.match(layer.name))
    return [layer.name for layer in experts if (layer.num_tokens or 0) < EXPERT_SHARE * most]


def lent_tokens(seen: Mapping[LayerPlan, int]) -> list[Warned]:
    """Return a warning for each mixture with experts that borrowed tokens; ``seen`` counts their own tokens."""
    poor: dict[str, dict[int, int]] = {}
    for layer, count in seen.items():
        if match := EXPERT.match(layer.name):
            poor.setdefault(match["moe"], {})[int(match["index"])] = count
    return [_warning(moe, counts, _LENT, f"{EXPERT_SHARE:.1%} of the") for moe, counts in poor.items()]


_SHARED = "they use the pooled activation ranges of all experts of that block."
_ALONE = "codes are chosen from the weights only."
_LENT = "their codes are also chosen for tokens of the other experts of that block."


def _warning(moe: str, counts: dict[int, int], consequence: str, limit: str = str(MIN_TOKENS)) -> Warned:
    listed = ", ".join(f"expert {index} {count}" for index, count in sorted(counts.items())[:8])
    more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
    return Warned(
        "expert_saw_few_tokens",
        f"{len(counts)} expert(s) of {moe} saw fewer than {limit} calibration tokens ({listed}{more}): {consequence}",
    )
