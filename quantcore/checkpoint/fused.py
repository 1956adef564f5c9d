"""Layers that runtimes such as vLLM compute in one product, and that need one scheme there. Known by their names."""

from __future__ import annotations

from collections.abc import Iterable

from quantcore.checkpoint.experts import EXPERT

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""The last parts of the names of layers that are fused within one module, in the order of their rows."""
_PLACES = {part: (parts, place) for parts in _TOGETHER for place, part in enumerate(parts)}

Group = tuple[str, tuple[str, ...]]
"""The module and the last parts of the names of the layers that are fused in it; no parts for all experts of it."""


def group_of(name: str) -> Group | None:
    """Return the group that layer ``name`` is fused in, if it has the name of such a layer."""
    if expert := EXPERT.match(name):
        return expert["moe"], ()
    owner, _, last = name.rpartition(".")
    return (owner, _PLACES[last][0]) if last in _PLACES else None


def fused_groups(names: Iterable[str]) -> dict[Group, list[str]]:
    """Return the ``names`` of every group of two or more layers, in the order in which they are fused."""
    groups: dict[Group, list[str]] = {}
    for name in names:
        if (group := group_of(name)) is not None:
            groups.setdefault(group, []).append(name)
    return {group: sorted(members, key=_place) for group, members in groups.items() if len(members) > 1}


def is_last(name: str) -> bool:
    """Return True if the rows of layer ``name`` are the last of its fused layer."""
    last = name.rpartition(".")[2]
    return last in _PLACES and last == _PLACES[last][0][-1]


def _place(name: str) -> int:
    return _PLACES.get(name.rpartition(".")[2], ((), 0))[1]
