"""Settings of the libraries of an engine's process, made through its environment before they load."""

from __future__ import annotations

import os

CACHED_KERNELS = 16
"""Number of products that oneDNN, and torch above it, keep compiled. A dense block has fewer shapes. The experts of a
mixture get another number of tokens each: the default of 1024 grows to 0.3 GB a process there, and saves no time."""
OWN_SETTINGS = {
    "TOKENIZERS_PARALLELISM": "false",  # no threads: we start processes beside them
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(CACHED_KERNELS),
    "LRU_CACHE_CAPACITY": str(CACHED_KERNELS),
}
"""They hold unless the environment has others."""


def of_other_programs() -> dict[str, str]:
    """Return the environment for a program that is not ours: it runs with its own defaults."""
    return {name: value for name, value in os.environ.items() if OWN_SETTINGS.get(name) != value}
