"""Finds experts in a checkpoint by names and shapes: their tensors, and the matrix that routes to them.

Legend: E experts, H hidden size, I inner size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantcore.checkpoint.layout import Stack, TensorHeader
from quantcore.checkpoint.model_config import ModelConfig

EXPERT = re.compile(r"^(?P<moe>.+)\.experts\.(?:expert_)?(?P<index>\d+)\.(?P<projection>.+)$")
"""Pattern of a matrix or layer of an expert, called 0 or expert_0; ``moe`` holds experts, router and shared experts."""

_ROUTER = re.compile(r"\.(gate|router)(?=\.|$)")
_MOE = re.compile(r"(^|[._])(moe|experts?)([._]|$)")
_DOWN = {
    "experts.gate_up_proj": "experts.down_proj",
    "input_linear.weight": "output_linear.weight",  # Granite
    "experts.fc1.weight": "experts.fc2.weight",  # Aria
    "experts.w13_weight": "experts.w2_weight",  # Inkling
}
_WITHOUT_GATE = "input_linear.weight"  # in the attention of JetMoe
_INTERLEAVED = "experts.w13_weight"
_SEPARATE = ("gate_proj", "up_proj", "down_proj")
_ROWS = ("w1", "v1", "w2")  # DBRX
_GATE_UP = re.compile(rf"^(.+)\.({'|'.join(map(re.escape, _DOWN))})$")


def is_in_stack(layer: str) -> bool:
    """Return True for an expert that Transformers holds in a stack; ``expert_0`` is a separate module (NLLB-MoE)."""
    return EXPERT.match(f"{layer}.weight") is not None and ".experts.expert_" not in layer


def unstack_experts(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Present 3-D stacks of expert weights as one matrix [out, in] per expert and projection, over the same bytes.

    ``X.experts.gate_up_proj`` [E, 2I, H] and ``X.experts.down_proj`` [E, H, I] (Qwen 3.5; Granite calls them
    ``X.input_linear.weight`` and ``X.output_linear.weight``) become ``X.experts.0.gate_proj.weight``, ``up_proj`` and
    ``down_proj``: what other quantizers write and vLLM reads. Llama 4 and Aria store transposes. gpt-oss stores
    transposes with interleaved rows and biases, Inkling interleaved rows: their gate and up stay one matrix,
    ``X.experts.0.gate_up_proj.weight``. Step 3.7 has three stacks, such as ``X.gate_proj.weight`` [E, I, H], and DBRX
    ``X.experts.mlp.w1`` [E * I, H]. Experts of attention (JetMoe) have no gate. Other stacks stay as they are.
    """
    parts: dict[str, dict[str, TensorHeader]] = {}
    for name, gate_up in tensors.items():
        if (match := _GATE_UP.match(name)) and len(gate_up.shape) == 3:
            down_name = f"{match[1]}.{_DOWN[match[2]]}"
            down = tensors.get(down_name)
            if down is None or len(down.shape) != 3:
                continue
            experts = f"{match[1]}.experts"
            (_, a, b), (_, c, d) = gate_up.shape, down.shape
            if (a, b) == (2 * d, c):
                projections = ("gate_up_proj",) if match[2] == _INTERLEAVED else ("gate_proj", "up_proj")
                parts[name] = dict(_matrices(name, gate_up, experts, projections))
                parts[down_name] = dict(_matrices(down_name, down, experts, ("down_proj",)))
            elif (a, b) == (d, c) and match[2] == _WITHOUT_GATE:
                parts[name] = dict(_matrices(name, gate_up, experts, ("up_proj",)))
                parts[down_name] = dict(_matrices(down_name, down, experts, ("down_proj",)))
            elif (a, b) == (d, 2 * c) and f"{name}_bias" not in tensors:
                parts[name] = dict(_halves(name, gate_up, experts, ("gate_proj", "up_proj")))
                parts[down_name] = dict(_transposes(down_name, down, experts, "down_proj"))
            elif (a, b) == (d, 2 * c) and f"{down_name}_bias" in tensors:
                for stack, projection in ((name, "gate_up_proj"), (down_name, "down_proj")):
                    parts[stack] = dict(_transposes(stack, tensors[stack], experts, projection))
                    bias = f"{stack}_bias"
                    parts[bias] = dict(_biases(bias, tensors[bias], experts, projection))
        elif name.endswith(f".{_SEPARATE[0]}.weight"):
            moe = name.removesuffix(f".{_SEPARATE[0]}.weight")
            stacks = {projection: f"{moe}.{projection}.weight" for projection in _SEPARATE}
            if all(stack in tensors and is_stack_of_experts(stack, tensors[stack].shape) for stack in stacks.values()):
                for projection, stack in stacks.items():
                    parts[stack] = dict(_matrices(stack, tensors[stack], f"{moe}.experts", (projection,)))
        elif name.endswith(f".experts.mlp.{_ROWS[0]}"):
            experts = name.removesuffix(f".mlp.{_ROWS[0]}")
            router = tensors.get(f"{experts.removesuffix('.experts')}.router.layer.weight")
            stacks = {projection: f"{experts}.mlp.{rows}" for projection, rows in zip(_SEPARATE, _ROWS, strict=True)}
            if router is not None and all(stack in tensors for stack in stacks.values()):
                for projection, stack in stacks.items():
                    parts[stack] = dict(_of_rows(stack, tensors[stack], experts, projection, router.shape[0]))
    return {new: header for name, old in tensors.items() for new, header in parts.get(name, {name: old}).items()}


def unstack_mxfp4(tensors: Mapping[str, TensorHeader]) -> tuple[dict[str, TensorHeader], dict[str, Stack]]:
    """Present the codes of each expert of the published gpt-oss separately; also return the stacks of the floats.

    ``X.experts.gate_up_proj_blocks`` uint8 [E, out, in / 32, 16] and ``_scales`` uint8 [E, out, in / 32] become
    ``X.experts.0.gate_up_proj.weight`` [out, in / 2] and ``weight_scale`` [out, in / 32], as AMD Quark lays out MXFP4;
    ``_bias`` [E, out] becomes ``bias``. The floats of ``weight`` are the transposes of a stack [E, in, out].
    """
    unstacked, stacks = dict(tensors), {}
    for name, blocks in tensors.items():
        stack = name.removesuffix("_blocks")
        if stack == name or len(blocks.shape) != 4 or f"{stack}_scales" not in tensors:
            continue
        num_experts, rows, groups, num_bytes = blocks.shape
        experts, _, projection = stack.rpartition(".")
        layers = [f"{experts}.{index}.{projection}" for index in range(num_experts)]
        parts = {
            name: ("weight", (rows, groups * num_bytes)),
            f"{stack}_scales": ("weight_scale", (rows, groups)),
            f"{stack}_bias": ("bias", (rows,)),
        }
        for whole, (part, shape) in parts.items():
            if whole in tensors:
                names = [f"{layer}.{part}" for layer in layers]
                unstacked.update(_slices(whole, unstacked.pop(whole), names, shape, transposed=False))
        shape = (num_experts, groups * num_bytes * 2, rows)
        stacks.update({f"{layer}.weight": Stack(stack, shape, 0) for layer in layers})
    return unstacked, stacks


def routing_of(config: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the number of experts of a mixture, and of those that a token gets if config.json says it; else None.

    The language model's part of a nested config counts.
    """
    sizes = ModelConfig(config)
    if sizes.num_experts is None:
        return None
    per_token = sizes.num_experts_per_token
    return {"num_experts": sizes.num_experts} | ({} if per_token is None else {"num_per_token": per_token})


def find_routers(shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the modules that choose experts or weight shared ones; they are small, and errors misroute tokens.

    They are the matrices in a module called gate or router beside the experts (``mlp.gate``, ``router.layer``,
    ``gate.router_mlp.fc1``), and, by shape (``shapes`` of all tensors, by name), those directly beside the experts with
    one output per expert, or a single one (``mlp.shared_expert_gate``).
    """
    num_experts = find_moes(shapes)
    routers = set()
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        owner = module.rpartition(".")[0]
        inside = (module[: match.start()] for match in _ROUTER.finditer(module))
        beside = owner in num_experts and shape[0] in (1, num_experts[owner])
        if len(shape) == 2 and (beside or any(path in num_experts for path in inside)):
            routers.add(module)
    return routers


def is_stack_of_experts(name: str, shape: Sequence[int]) -> bool:
    """Return True if a tensor stacks the weights of several experts, judged by its name and its axes."""
    is_router = len(shape) == 2 and _ROUTER.search(name) is not None  # JetMoe has one inside of a module of experts
    if len(shape) < 2 or EXPERT.match(name) or is_router:
        return False
    return ".experts." in name or (len(shape) == 3 and _MOE.search(name) is not None)


def is_stack_of_shared_experts(name: str, shape: Sequence[int]) -> bool:
    """Return True for a stack of the experts that every token gets: Inkling has two of them in a block."""
    return len(shape) == 3 and is_stack_of_experts(name, shape) and "shared" in name


def find_moes(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the modules that have experts, each with the number of its experts."""
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        if match := EXPERT.match(name):
            counts[match["moe"]] = max(counts.get(match["moe"], 0), int(match["index"]) + 1)
        elif is_stack_of_experts(name, shape):
            path, inside, _ = name.partition(".experts.")
            counts.setdefault(path if inside else name.removesuffix(".weight").rpartition(".")[0], shape[0])
    return counts


def _matrices(
    name: str, stack: TensorHeader, experts: str, projections: tuple[str, ...]
) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the matrices of a stack [E, n * out, in], in which those of each expert lie one after the other."""
    num_experts, rows, columns = stack.shape
    shape = (rows // len(projections), columns)
    names = [f"{experts}.{index}.{projection}.weight" for index in range(num_experts) for projection in projections]
    yield from _slices(name, stack, names, shape, transposed=False)


def _transposes(name: str, stack: TensorHeader, experts: str, projection: str) -> Iterator[tuple[str, TensorHeader]]:
    num_experts, columns, rows = stack.shape
    names = [f"{experts}.{index}.{projection}.weight" for index in range(num_experts)]
    yield from _slices(name, stack, names, (rows, columns), transposed=True)


def _of_rows(
    name: str, rows: TensorHeader, experts: str, projection: str, num_experts: int
) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the matrices of [E * I, H], in which those of each expert lie one after the other: of down, transposes."""
    height, width = rows.shape[0] // num_experts, rows.shape[1]
    names = [f"{experts}.{index}.{projection}.weight" for index in range(num_experts)]
    is_down = projection == _SEPARATE[-1]
    yield from _slices(name, rows, names, (width, height) if is_down else (height, width), transposed=is_down)


def _halves(
    name: str, stack: TensorHeader, experts: str, projections: tuple[str, str]
) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the matrices of a stack [E, in, 2 * out], in which the transposes of an expert's two lie side by side."""
    num_rows = stack.shape[2] // 2
    for half, projection in enumerate(projections):
        for name_of_one, whole in _transposes(name, stack, experts, projection):
            rows = (half * num_rows, (half + 1) * num_rows)
            yield name_of_one, replace(whole, shape=(num_rows, whole.shape[1]), rows=rows)


def _biases(name: str, stack: TensorHeader, experts: str, projection: str) -> Iterator[tuple[str, TensorHeader]]:
    names = [f"{experts}.{index}.{projection}.bias" for index in range(stack.shape[0])]
    yield from _slices(name, stack, names, stack.shape[1:], transposed=False)


def _slices(
    name: str, header: TensorHeader, names: list[str], shape: tuple[int, ...], *, transposed: bool
) -> Iterator[tuple[str, TensorHeader]]:
    stack = Stack(name, header.shape, header.begin)
    size = header.num_bytes // len(names)
    for index, part in enumerate(names):
        begin = header.begin + index * size
        yield part, replace(header, shape=shape, begin=begin, end=begin + size, transposed=transposed, stack=stack)
