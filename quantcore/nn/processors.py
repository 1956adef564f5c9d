"""AMD Quark's names for what runs an algorithm, which its users import beside the configs: names only."""

from __future__ import annotations

from typing import Any

from quantcore.errors import ConfigError


class Processor:
    """Stands for the name only: algorithms are run by the engine."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} is not for use: the engine runs algorithms itself.",
            code="unsupported_algorithm",
            hint="Give Config the algorithm's config (AWQConfig, SmoothQuantConfig, GPTQConfig) as algo_config.",
            field="/algo_config",
        )


class AwqProcessor(Processor): ...


class SmoothQuantProcessor(Processor): ...


class GptqProcessor(Processor): ...
