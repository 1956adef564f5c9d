"""The flags of a goal, which ``auto``, ``submit``, ``plan`` and ``clone`` take. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from quantcore.config.goal import DEFAULT_RECOVERY, RUNTIMES, Goal, parse_duration, parse_recovery, parse_tokens
from quantcore.config.target_devices import DEVICES
from quantcore.errors import ConfigError

T = TypeVar("T")
GOAL_FLAGS = ("runtime", "device", "min_recovery", "context", "time")
"""The flags that say that a job has a goal."""


def add_goal(flags: argparse.ArgumentParser, *, is_alone: bool) -> None:
    """Add the flags that ``goal_of`` reads. Unless a goal ``is_alone``, --max_size exists for a mix already."""
    add = flags.add_argument_group("goal").add_argument
    add("--runtime", required=is_alone, choices=RUNTIMES, help="program that will run the result")
    names = ", ".join(DEVICES)
    add("--device", required=is_alone, help=f"where it will run: a GPU's memory, as 24GB, or one of {names}")
    if is_alone:
        add("--max_size", help="largest size of all weight files, as 4GB (default: what fits the device)")
    add(
        "--min_recovery",
        type=_told(parse_recovery),
        default=DEFAULT_RECOVERY,
        metavar="SHARE",
        help="share of the original's probability per token to keep, exp(-KL), or 'best' for the best that fits"
        f" (default: {100 * DEFAULT_RECOVERY:g}%%, as a faithful result)",
    )
    add(
        "--context",
        type=_told(parse_tokens),
        default=8192,
        help="tokens whose KV cache must fit the device beside the weights, as 32k (default: 8k)",
    )
    add("--time", type=_told(parse_duration), help="start no candidate that would end later, as 2h (default: no limit)")


def goal_of(options: argparse.Namespace) -> Goal:
    """Return the goal of the flags. Raises ConfigError for an unknown device, or a size that is none."""
    if missing := [name for name in ("runtime", "device") if getattr(options, name) is None]:
        raise ConfigError(
            f"A goal names a runtime and a device, and there is no --{missing[0]}.",
            code="invalid_goal",
            hint="For example: --runtime vllm --device 24GB.",
            field=f"/goal/{missing[0]}",
        )
    return Goal(
        runtime=options.runtime,
        device=options.device,
        max_size=options.max_size,
        min_recovery=options.min_recovery,
        context=options.context,
        max_time_s=options.time,
    )


def _told(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return ``parse`` as the type of a flag, whose errors argparse shows."""
    return partial(_parsed, parse)


def _parsed(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error.message} {error.hint}") from error
