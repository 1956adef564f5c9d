"""AMD Quark's names for the classes that run algorithms; its users import them along with the configs. Names only."""

from __future__ import annotations

from typing import Any

from quantcore.errors import ConfigError


class Processor:
    """A placeholder for the name: the engine runs algorithms itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} cannot be used directly: the engine runs algorithms itself.",
            code="unsupported_algorithm",
            hint="Pass the algorithm's config (AWQConfig, SmoothQuantConfig, GPTQConfig) to Config as algo_config.",
            field="/algo_config",
        )


class AwqProcessor(Processor): ...


class SmoothQuantProcessor(Processor): ...


class GptqProcessor(Processor): ...
