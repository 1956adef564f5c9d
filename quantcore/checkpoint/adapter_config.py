"""The settings of a PEFT adapter, and which of them cannot be merged into a model. No torch.

``adapter_config.json`` says which modules an adapter changes and by which scale. What PEFT itself cannot merge, what
would give another model than the one that was trained, and what is not known here is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from quantcore.errors import ModelError

MERGE_WITH_PEFT = (
    "Merge it with PEFT (model.merge_and_unload(), then save_pretrained), and quantize the folder that this writes."
)
_STARTS_FROM_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base model's weights as they are."""
_REFUSED = {
    "alora_invocation_tokens": "it acts on some tokens only (aLoRA), so that no weights are equal to it",
    "layer_replication": "it repeats layers of the base model",
    "target_parameters": "it changes parameters that hold all experts of a layer",
    "trainable_token_indices": "it replaces single rows of the embedding",
    "use_qalora": "it pools its inputs (QALoRA)",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
}
_WITHOUT_EFFECT = {
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out", "inference_mode",
    "lora_dropout", "lora_ga_config", "loftq_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
}  # fmt: skip
"""Settings for training alone, or that the files say as well.

PEFT itself sets ``fan_in_fan_out`` by the class of each layer, and ``ensure_weight_tying`` shows in the tensors.
"""


class AdapterConfig(BaseModel):
    """The settings that decide what an adapter is merged into, and how; the names are PEFT's."""

    model_config = ConfigDict(frozen=True, extra="allow")

    base_model_name_or_path: str | None = None
    r: int = Field(default=8, ge=1)
    lora_alpha: float = 8
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    use_rslora: StrictBool = False
    use_dora: StrictBool = False
    lora_bias: StrictBool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None

    @property
    def method(self) -> str:
        return "DoRA" if self.use_dora else "LoRA"

    def rank(self, module: str) -> int:
        """Return the rank of the adapter's matrices for ``module``."""
        return self.rank_pattern.get(_pattern_of(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        """Return the factor of the product of the matrices for ``module``."""
        rank = self.rank(module)
        alpha = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, module), self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Return True if PEFT would put the adapter on ``module`` (PEFT's ``check_target_module_exists``)."""
        if _is_one_of(module, self.exclude_modules) or _is_inside(module, self.modules_to_save or ()):
            return False
        if self.target_modules == "all-linear":
            return True
        return _is_one_of(module, self.target_modules) and self._is_in_layers(module)

    def _is_in_layers(self, module: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == [] or isinstance(self.target_modules, str):
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        for pattern in patterns or [r"[^.]*"]:
            if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return int(match[1]) in ([wanted] if isinstance(wanted, int) else wanted)
        return False


def parse_adapter_config(data: Mapping[str, Any]) -> AdapterConfig:
    """Return the settings in an ``adapter_config.json``.

    Raises ModelError ``unsupported_adapter`` for another type than LORA and for settings that cannot be merged, and
    ``invalid_adapter`` for values that make no sense.
    """
    kind = data.get("peft_type")
    if kind != "LORA":
        raise unsupported(f"Its type is {str(kind)[:40]}, and only LORA (with DoRA) can be merged", MERGE_WITH_PEFT)
    try:
        config = AdapterConfig.model_validate(data)
        for pattern in _patterns(config):
            re.compile(pattern)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = "/".join(map(str, problem["loc"]))
        raise invalid(f"adapter_config.json is not valid at {place}: {problem['msg']}.") from error
    except re.error as error:
        raise invalid(f"adapter_config.json holds a pattern that cannot be read: {error}.") from error
    if min(config.rank_pattern.values(), default=1) < 1:
        raise invalid(f"adapter_config.json has the rank {min(config.rank_pattern.values())} in rank_pattern.")
    more = {name: value for name, value in (config.model_extra or {}).items() if value}
    for name in more.keys() - _WITHOUT_EFFECT:
        raise unsupported(f"It sets {name}: {_REFUSED.get(name, 'this is not known here')}", MERGE_WITH_PEFT)
    start = config.init_lora_weights
    if start is not None and start not in _STARTS_FROM_BASE:
        raise unsupported(
            f"Its init_lora_weights is '{start}': training began with other weights than those of the base model",
            "Save it as a plain LoRA adapter: PEFT's save_pretrained(path_initial_model_for_weight_conversion=...).",
        )
    return config


def unsupported(why: str, hint: str) -> ModelError:
    return ModelError(f"This adapter cannot be merged. {why}.", code="unsupported_adapter", hint=hint)


def invalid(what: str) -> ModelError:
    return ModelError(what, code="invalid_adapter", hint="Save the adapter again with PEFT.")


def _patterns(config: AdapterConfig) -> Iterator[str]:
    """Yield what PEFT reads as regular expressions: of modules only a single text, not a list of names."""
    yield from (*config.rank_pattern, *config.alpha_pattern, *(config.modules_to_save or ()))
    yield from (value for value in (config.target_modules, config.exclude_modules) if isinstance(value, str))
    yield from [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern or ()


def _pattern_of(patterns: Iterable[str], module: str) -> str:
    """Return the first pattern that fits the end of a module's name (PEFT's ``get_pattern_key``)."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), module)


def _is_one_of(module: str, names: str | list[str] | None) -> bool:
    """Return True if a regular expression matches the whole name, or a list has the name or its last parts."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names or ())


def _is_inside(module: str, names: Iterable[str]) -> bool:
    return any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in names)
