"""Compares a plan with hardware, for memory, disk and time, from only config.json or headers. No torch.

Equal blocks are planned once, so that the answer takes no longer for a deep model. Every figure of memory comes from
``quantcore.plan.footprint``; every figure of time is work divided by an assumed speed, and both are shown.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantcore.checkpoint.blocks import DEPTHS, KINDS, find_blocks
from quantcore.checkpoint.experts import EXPERT
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.layers import is_linear
from quantcore.checkpoint.layout import TensorHeader
from quantcore.checkpoint.model_config import ModelConfig
from quantcore.config.job_spec import JobSpec
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.export.exporter import max_file_bytes
from quantcore.plan.distillation import BYTES_PER_SCALE, SAVED_BYTES_PER_SCALE, bytes_of_scales, num_passes
from quantcore.plan.footprint import DEVICE_RUNTIME_BYTES, Footprint, Parts, by_block
from quantcore.plan.hardware import DEVICE, GB, HOST, Hardware, Speeds
from quantcore.plan.layer_sizes import Input, input_of
from quantcore.plan.planner import FILE_TO_FILE, STREAMED, Plan, make_plan
from quantcore.plan.workload import (
    KERNEL_INPUTS,
    SOLVED_ROWS,
    STATES_SHARE,
    count_coupled,
    solving_flops,
    too_large_for_one,
)

STREAMED_FSDP, RESIDENT_FSDP = "streamed_fsdp", "resident_fsdp"
USABLE = 0.95
"""Usable share of a device's memory: the rest is lost to fragmentation."""
FLOAT_PASSES = 20
"""Number of passes of every value through memory, in float32, while it is rounded, packed and measured."""
FEWER_SAMPLES = (255, 127, 63, 31)
"""Numbers of windows at which the number of sums of statistics falls by one."""
PASSES_BACK = 4
"""Costs of the gradients in passes forward: one to keep the states, one again and one back, one back while solving."""
GRAM_SHARE = 10 / 16  # of x^T x, which is symmetric: see calibration.sums


@dataclass(frozen=True)
class Work:
    """The work of a job, over all blocks.

    ``num_streams`` of hidden states; ``num_values`` to round; ``active`` weights multiplied for each token; ``grams``,
    the bytes of the matrices of inputs, and ``gram_flops`` for them a token; ``shared_grams``, those that every rank
    gets; ``solving_flops`` of the busiest rank; ``solving_steps``, see ``Speeds.step_s``; ``back_flops`` a token, for
    the gradients of the predictions.
    """

    num_streams: int
    num_values: int
    active: float
    grams: int
    shared_grams: int
    gram_flops: float
    solving_flops: float
    solving_steps: int
    back_flops: float


@dataclass(frozen=True)
class Candidate:
    """An executor with its bytes by part on each device (or in each process of a CPU), and if they fit."""

    executor: str
    parts: Parts
    fits: bool

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Capacity:
    """The result. ``candidates``: every executor; ``chosen`` is the first that fits, or the one that needs least.

    ``verify``: the memory of the process that verifies the result and of the one that waits for it, on one device or
    on the CPU. ``host`` is the memory of one node in its largest phase, ``disk`` that of all nodes, both by part;
    ``seconds`` by part, one after the other.
    """

    plan: Plan
    hardware: Hardware
    num_parameters: int
    size_before_bytes: int
    size_after_bytes: int
    num_layers: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    verify: Parts
    host: Parts
    disk: Parts
    seconds: dict[str, float]
    speeds: Speeds
    faults: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "executor": self.chosen.executor,
            "hardware": {**vars(self.hardware), "num_ranks": self.hardware.num_ranks},
            "num_parameters": self.num_parameters,
            "num_layers": self.num_layers,
            "size_before_bytes": self.size_before_bytes,
            "size_after_bytes": self.size_after_bytes,
            "bytes_per_rank": {"total": self.chosen.num_bytes, **self.chosen.parts},
            "verify_bytes": {"total": sum(self.verify.values()), **self.verify},
            "host_bytes_per_node": {"total": sum(self.host.values()), **self.host},
            "disk_bytes": {"total": sum(self.disk.values()), **self.disk},
            "seconds": {"total": round(sum(self.seconds.values())), **{k: round(v) for k, v in self.seconds.items()}},
            "assumptions": vars(self.speeds) | {"usable_share_of_a_device": USABLE},
            "candidates": [
                {"executor": way.executor, "bytes_per_rank": way.num_bytes, "fits": way.fits} for way in self.candidates
            ],
            "faults": list(self.faults),
            "advice": list(self.advice),
            "warnings": list(self.plan.warnings),
        }


def plan_for(hardware: Hardware, spec: JobSpec, headers: ModelHeaders) -> Capacity:
    """Plan one block of each kind, and compare all blocks with ``hardware``. Raises the errors of ``plan.planner``."""
    blocks = find_blocks(headers.tensors, headers.config)
    counts = [1] * len(blocks)
    headers = replace(headers, stored_bytes=None)
    if not _names_blocks(spec.config) and len(blocks.lists) == 1:
        tensors, counts = distinct_blocks(headers.tensors, *blocks.lists[0])
        headers = replace(headers, config=_of_depth(headers.config, len(counts)), tensors=tensors)
    return capacity(make_plan(spec, headers), spec, headers, counts, hardware)


def capacity(plan: Plan, spec: JobSpec, headers: ModelHeaders, counts: Sequence[int], hardware: Hardware) -> Capacity:
    """Compute the capacity for ``plan`` with ``counts[i]`` blocks like its block i."""
    config, tensors = spec.config, headers.tensors
    footprint = plan.footprint
    before = _in_all(plan, counts, {name: entry.num_bytes for name, entry in tensors.items()})
    after = _in_all(plan, counts, {name: entry.num_bytes for name, entry in plan.layouts[plan.main_export].items()})
    num_parameters = _in_all(plan, counts, {name: math.prod(entry.shape) for name, entry in tensors.items()})
    footprint = replace(footprint, whole=before, num_values=num_parameters, num_blocks=sum(counts))
    if footprint.tuned:
        footprint = replace(footprint, tuned=_in_all(plan, counts, bytes_of_scales(plan.layers)))
    candidates = _candidates(plan, footprint, hardware, can_shard=config.needs_whole_blocks is None)
    able = [entry for entry in candidates if entry.executor != RESIDENT_FSDP]  # that one cannot calibrate
    chosen = next((entry for entry in able if entry.fits), min(able, key=lambda entry: entry.num_bytes))
    work = _work(plan, config, headers, counts, hardware)
    disk = {"model": before, "artifact": after, "hidden_states": _states_on_disk(footprint, hardware, chosen)}
    if footprint.states:
        disk["saved_states"] = 2 * footprint.states
    disk |= {"staged_codes": after} if footprint.laid_out else {}
    disk |= {"file_to_split": after} if "gguf" in spec.export and after > max_file_bytes(spec.max_shard_size) else {}
    disk |= {"measured_states": footprint.all_states} if footprint.num_schemes else {}
    if footprint.needs_backward:
        disk["gradients"] = footprint.all_states
    if config.distills is not None:
        disk |= {"codes": work.num_values, "distilled_states": footprint.all_stepped}
        disk["saved_tuning"] = footprint.tuned // BYTES_PER_SCALE * SAVED_BYTES_PER_SCALE
    host = _host(footprint, hardware, chosen)
    verify = _verify(footprint, hardware, chosen)
    faults, advice = _verdict(plan, footprint, hardware, chosen, verify, host, disk)
    return Capacity(
        plan=plan,
        hardware=hardware,
        num_parameters=num_parameters,
        size_before_bytes=before,
        size_after_bytes=after,
        num_layers=sum(1 if layer.block is None else counts[layer.block] for layer in plan.layers),
        candidates=candidates,
        chosen=chosen,
        verify=verify,
        host=host,
        disk=disk,
        seconds=_seconds(plan, work, before, after, hardware, chosen) | _tuning(plan, config, work, hardware),
        speeds=_speeds(hardware),
        faults=faults,
        advice=advice,
    )


def distinct_blocks(
    tensors: Mapping[str, TensorHeader], prefix: str, num_blocks: int
) -> tuple[dict[str, TensorHeader], list[int]]:
    """Return the tensors with one block of each kind, renumbered, and how many blocks there are of each kind.

    Blocks of one kind have tensors with the same names, shapes and dtypes. Blocks after ``num_blocks`` all stay.
    """
    blocks: dict[int, dict[str, TensorHeader]] = {}
    distinct: dict[str, TensorHeader] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            number, _, rest = name[len(prefix) :].partition(".")
            blocks.setdefault(int(number), {})[rest] = tensor
        else:
            distinct[name] = tensor
    kinds: dict[object, list[int]] = {}
    for index in range(num_blocks):
        kind = tuple(sorted((name, header.dtype, header.shape) for name, header in blocks[index].items()))
        kinds.setdefault(kind, []).append(index)
    kept = [*(alike[0] for alike in kinds.values()), *(index for index in sorted(blocks) if index >= num_blocks)]
    for place, index in enumerate(kept):
        distinct |= {f"{prefix}{place}.{name}": tensor for name, tensor in blocks[index].items()}
    return distinct, [len(alike) for alike in kinds.values()]


def _names_blocks(config: Config) -> bool:
    """Return True if a pattern or the types of GGUF can distinguish blocks or experts, by a number or a wildcard."""
    named = (config.kv_cache_quant_config, config.layer_quant_config)
    patterns = [*config.exclude, *(pattern for table in named for pattern in table)]
    return config.gguf is not None or any(re.search(r"(?<![A-Za-z_\d])\d|[?\[]", pattern) for pattern in patterns)


def _of_depth(model_config: Mapping[str, Any], num_blocks: int) -> dict[str, Any]:
    """Return ``model_config`` with another number of blocks, nested configs included."""
    changed: dict[str, Any] = {}
    for key, value in model_config.items():
        if isinstance(value, Mapping):
            changed[key] = _of_depth(value, num_blocks)
        elif key in KINDS and isinstance(value, list):
            changed[key] = value[:num_blocks]
        else:
            changed[key] = num_blocks if key in DEPTHS and isinstance(value, int) else value
    return changed


def _in_all(plan: Plan, counts: Sequence[int], sizes: Mapping[str, int]) -> int:
    """Return the sum of a figure of tensors over the whole model."""
    return _weighted(by_block(plan.blocks, sizes), counts)


def _weighted(sums: Mapping[int, int], counts: Sequence[int]) -> int:
    return sum(size * (counts[block] if 0 <= block < len(counts) else 1) for block, size in sums.items())


def _candidates(
    plan: Plan, footprint: Footprint, hardware: Hardware, *, can_shard: bool = True
) -> tuple[Candidate, ...]:
    limit = USABLE * hardware.device_bytes if hardware.num_devices else hardware.host_bytes
    num_ranks = hardware.num_ranks
    ways = {STREAMED: footprint.streamed(num_ranks=num_ranks)}
    if not plan.needs_calibration and not footprint.num_schemes:
        ways = {FILE_TO_FILE: footprint.file_to_file(), **ways}
    if num_ranks > 1:
        if can_shard:
            ways[STREAMED_FSDP] = footprint.streamed(num_ranks=num_ranks, num_shards=num_ranks)
        ways[RESIDENT_FSDP] = footprint.resident(num_ranks=num_ranks)
    candidates = []
    for executor, parts in ways.items():
        if hardware.num_devices:
            parts = {**parts, "runtime": DEVICE_RUNTIME_BYTES}
        if not _states_fit(footprint, hardware):
            parts = {**parts, "activations": 0} if "activations" in parts else parts
        candidates.append(Candidate(executor, parts, not limit or sum(parts.values()) <= limit))
    return tuple(candidates)


def _states_fit(footprint: Footprint, hardware: Hardware) -> bool:
    """Return True if the hidden states fit into the memory of each rank, by the rule of ``engine.runtime.states``."""
    limit = hardware.device_bytes if hardware.num_devices else hardware.host_bytes
    return not limit or footprint.states <= hardware.num_ranks * STATES_SHARE * limit


def _states_on_disk(footprint: Footprint, hardware: Hardware, chosen: Candidate) -> int:
    is_running = chosen.executor != FILE_TO_FILE
    return footprint.states if is_running and not _states_fit(footprint, hardware) else 0


def _verify(footprint: Footprint, hardware: Hardware, chosen: Candidate) -> Parts:
    """Return the memory of the process that verifies and of the one that waits: on the CPU or on their device."""
    parts = footprint.verifying(runs_model=chosen.executor != FILE_TO_FILE)
    if not hardware.num_devices:
        return parts
    if chosen.executor == FILE_TO_FILE:
        return {}  # files are compared on the host
    return {**parts, "waiting_process": DEVICE_RUNTIME_BYTES, "runtime": DEVICE_RUNTIME_BYTES}


def _host(footprint: Footprint, hardware: Hardware, chosen: Candidate) -> Parts:
    """Return the memory of all processes of a node, in its largest phase."""
    parts = footprint.host() if hardware.num_devices else chosen.parts
    quantize = {name: hardware.ranks_a_node * size for name, size in parts.items()}
    runs_here = chosen.executor != FILE_TO_FILE and not hardware.num_devices
    return max(quantize, footprint.verifying(runs_model=runs_here), key=lambda parts: sum(parts.values()))


def _verdict(
    plan: Plan, footprint: Footprint, hardware: Hardware, chosen: Candidate, verify: Parts, host: Parts, disk: Parts
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the faults (parts that do not fit) and advice to make them fit."""
    faults: list[str] = []
    advice: list[str] = []
    if not chosen.fits and hardware.num_devices:
        faults.append(f"A device has {_gb(hardware.device_bytes)}, but {_gb(chosen.num_bytes / USABLE)} are needed.")
        advice += _smaller(plan, footprint, hardware)
        advice.append(f"Devices of {_gb(chosen.num_bytes / USABLE)} or more.")
    if hardware.num_devices and sum(verify.values()) > USABLE * hardware.device_bytes:
        size = _gb(sum(verify.values()) / USABLE)
        faults.append(f"A device has {_gb(hardware.device_bytes)}, but verifying the result needs {size}.")
        advice.append(f"Devices of {size} or more.")
    if hardware.host_bytes and sum(host.values()) > hardware.host_bytes:
        faults.append(f"A host has {_gb(hardware.host_bytes)}, but {_gb(sum(host.values()))} are needed.")
        advice.append(f"A host with {_gb(sum(host.values()))}, or fewer processes on each.")
    if hardware.disk_bytes and sum(disk.values()) > hardware.disk_bytes:
        faults.append(f"The disk has {_gb(hardware.disk_bytes)}, but {_gb(sum(disk.values()))} are needed.")
        advice.append(f"{_gb(sum(disk.values()) - hardware.disk_bytes)} more disk space, or the model on another disk.")
    return tuple(faults), tuple(advice)


def _smaller(plan: Plan, footprint: Footprint, hardware: Hardware) -> Iterator[str]:
    """Yield changes of the job that make it fit."""

    def fits(changed: Footprint) -> bool:
        return any(way.fits for way in _candidates(plan, changed, hardware) if way.executor != RESIDENT_FSDP)

    def fits_device(parts: Parts) -> bool:
        return sum(parts.values()) <= USABLE * hardware.device_bytes

    fewer = [n for n in FEWER_SAMPLES if n < plan.calibration.num_samples]
    for num_samples in fewer:
        share = num_samples / plan.calibration.num_samples
        changed = replace(footprint, num_windows=num_samples, states=int(footprint.states * share))
        if fits(changed):
            yield f"--num_calib_data {num_samples}: fewer statistics in memory at a time."
            break
    if footprint.grams and fits(replace(footprint, grams=0, gram=0, factors=0, solved=0)):
        yield ("Another algorithm: gptq needs the most memory, awq and rtn less; smoothquant stores no input matrices.")
    if fits_device(footprint.file_to_file()):
        yield "A scheme that needs no data (w4a16, mxfp4 or fp8_dynamic, without algorithms), from file to file."


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"


def _work(plan: Plan, config: Config, headers: ModelHeaders, counts: Sequence[int], hardware: Hardware) -> Work:
    tensors = headers.tensors
    num_experts = max((int(m["index"]) + 1 for name in tensors if (m := EXPERT.match(name))), default=1)
    share = min(1.0, (ModelConfig(headers.config).num_experts_per_token or num_experts) / num_experts)
    linear = {name: math.prod(entry.shape) for name, entry in tensors.items() if is_linear(name, entry)}
    everything = _in_all(plan, counts, linear)
    experts = _in_all(plan, counts, {name: size for name, size in linear.items() if EXPERT.match(name)})
    values = Counter[int]()
    inputs: dict[int, dict[Input, list[int]]] = {}
    for layer in plan.layers:
        block = -1 if layer.block is None else layer.block
        values[block] += layer.out_features * layer.in_features
        inputs.setdefault(block, {}).setdefault(input_of(layer), []).append(layer.out_features)
    count = max((entry.num_grams for entry in config.algo_config if entry.needs_calibration), default=0)
    grams, shared, flops, solving, steps = 0, 0, 0.0, 0.0, 0
    for block, widths in inputs.items():
        times = counts[block] if block >= 0 else 1
        parts = [(*solving_flops(width, sum(outs)), sum(outs)) for (_, width, _), outs in widths.items()]
        grams += times * count * sum(4 * width * width for _, width, _ in widths)
        flops += (
            times
            * count
            * sum(2 * GRAM_SHARE * width**2 * (share if ".experts." in name else 1) for name, width, _ in widths)
        )
        of_one, together = _solving(parts, hardware.num_ranks)
        solving += times * bool(count) * of_one
        tiles = ((-(-sum(outs) // SOLVED_ROWS), width) for (_, width, _), outs in widths.items())
        steps += times * bool(count) * sum(num_tiles * -(-width // KERNEL_INPUTS) for num_tiles, width in tiles)
        shared += times * count * sum(4 * width * width for n, (_, width, _) in enumerate(widths) if n in together)
    active = everything - (1 - share) * experts
    back = 0.0
    if config.needs_backward:
        outputs = {f"{layer.name}.weight": _output_flops(layer, share) for layer in plan.layers}
        back = PASSES_BACK * 2 * active + _in_all(plan, counts, outputs)
    return Work(1 + config.compares, _weighted(values, counts), active, grams, shared, flops, solving, steps, back)


def _output_flops(layer: LayerPlan, share: float) -> int:
    """Return the operations a token for the second moments of a layer's outputs; experts get a ``share`` of tokens."""
    return int(2 * GRAM_SHARE * count_coupled(layer.out_features) * (share if ".experts." in layer.name else 1))


def _solving(parts: Sequence[tuple[float, float, int]], num_ranks: int) -> tuple[float, set[int]]:
    """Return the operations of the busiest rank, and the inputs that all ranks solve together.

    ``parts`` has for each input the cost of the factorization, that of the rows, and the number of rows.
    """
    costs = [factorization + rows for factorization, rows, _ in parts]
    together = too_large_for_one(costs, num_ranks)
    flops = sum(parts[n][0] + parts[n][1] / min(num_ranks, -(-parts[n][2] // SOLVED_ROWS)) for n in together)
    apart = [cost for number, cost in enumerate(costs) if number not in together]
    return flops + (max(sum(apart) / num_ranks, max(apart)) if apart else 0.0), together


def _speeds(hardware: Hardware) -> Speeds:
    return DEVICE if hardware.num_devices else HOST


def _seconds(
    plan: Plan, work: Work, before: int, after: int, hardware: Hardware, chosen: Candidate
) -> dict[str, float]:
    """Estimate the seconds of each step, as if no two steps overlapped."""
    speeds, num_ranks = _speeds(hardware), hardware.num_ranks
    floats = 4 * work.num_values
    seconds = {"read": before / speeds.read}
    if chosen.executor == FILE_TO_FILE:
        seconds["to_devices"] = before / num_ranks / speeds.link
    else:
        tokens = plan.calibration.num_samples * plan.calibration.seq_len * plan.needs_calibration
        seconds["to_devices"] = before / speeds.link
        seconds["forward"] = 2 * work.active * tokens * work.num_streams / num_ranks / speeds.products
        if work.back_flops:
            seconds["gradients"] = work.back_flops * tokens / num_ranks / speeds.products
        seconds["statistics"] = work.gram_flops * tokens / num_ranks / speeds.grams
        summed = work.grams * num_ranks + work.shared_grams
        between_ranks = speeds.exchange if hardware.num_nodes == 1 else speeds.network
        seconds["exchange"] = summed / between_ranks if num_ranks > 1 else 0.0
        if chosen.executor == STREAMED_FSDP:  # every layer is gathered for every window
            windows = plan.calibration.num_samples * plan.needs_calibration / num_ranks
            seconds["exchange"] += before * windows * work.num_streams / between_ranks
        seconds["solve"] = work.solving_flops / speeds.solving + work.solving_steps / num_ranks * speeds.step_s
    seconds["round"] = FLOAT_PASSES * floats / num_ranks / speeds.rounding
    seconds["hash"] = floats / num_ranks / speeds.hashing
    seconds["write"] = after / speeds.write
    seconds["prove"] = after / speeds.read + (floats + after) / speeds.hashing
    return seconds


def _tuning(plan: Plan, config: Config, work: Work, hardware: Hardware) -> dict[str, float]:
    """Estimate the seconds of AutoRound, which ranks share, and of distillation; both without the head."""
    windows, text = {}, plan.calibration
    if (rounds := config.autorounds) is not None:
        windows["tune"] = PASSES_BACK * rounds.iters * min(rounds.batch_size, text.num_samples) / hardware.num_ranks
    if config.distills is not None:
        windows["distill"] = num_passes(config.distills, PASSES_BACK)
    flops = 2 * work.active * text.seq_len
    return {step: flops * num_windows / _speeds(hardware).products for step, num_windows in windows.items()}
