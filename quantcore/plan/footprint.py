"""Estimates a job's memory from shapes only: the same estimate for a plan, for hardware and for a report.

A job has two phases: one process (or one for each rank) quantizes, then a fresh process verifies while the first one
waits. A process goes through moments that free their memory at their end: its peak is its costliest moment. A model's
depth does not matter, except where a whole model generates text (see ``Footprint.allows_whole``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quantcore.checkpoint.blocks import Blocks
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.layers import is_head
from quantcore.checkpoint.layout import DTYPE_BYTES
from quantcore.checkpoint.model_config import ModelConfig
from quantcore.config.job_spec import JobSpec
from quantcore.config.layer_plan import LayerPlan
from quantcore.export.unread import unread
from quantcore.plan.cache_dtypes import bytes_of_caches
from quantcore.plan.distillation import NUM_HELD_BACK, bytes_of_scales
from quantcore.plan.layer_sizes import (
    coupled_of,
    grams_of,
    laid_out_of,
    most_weights,
    outputs_of,
    solved_of,
    values_beside,
    vocab_size_of,
)
from quantcore.plan.workload import (
    KEPT_STATES_BYTES,
    LOGIT_ROWS,
    NUM_PROBES,
    PART_ROWS,
    PROBE_POSITIONS,
    TILE_BYTES,
    WINDOWS_PER_STEP,
    count_sums,
    part_size,
)

RUNTIME_BYTES = 450 << 20
"""Memory of Python, torch and Transformers before any weight, measured by bench/__main__.py."""
FLOAT_COPIES = 4
"""Copies of the weight being rounded, in float32: weight, codes, dequantized values, error."""
WINDOW_COPIES = 4
"""Copies of a layer's input of one window, in float32, while statistics are collected."""
WINDOW_COPIES_BACK = 16
"""Copies of a window on the backward pass through a block: all tensors saved by its forward pass."""
AUTOROUND_BYTES = 88
"""Bytes for each weight of a block that AutoRound tunes: its value, parameters, gradients and what autograd saves.

Measured with three layers of 2048 x 2048 in bfloat16: 77, with the gradients of one chunk of windows; a sum over 8
chunks holds those of four.
"""
DISTILLED_LOGITS = 16
"""Copies of the logits while the divergence is taken backward: those of two models and their float32 forms."""
LOGIT_BYTES_BACK = 21
"""Bytes of a logit of a window while its gradients are taken: in the model's dtype and in float32, forward and back."""
PRODUCT_TILES = 3
"""Copies of a tile during a matrix product: the tile, the library's packed copy, and the result."""
PART_COPIES = 3
"""Copies of a part of the head's weight and of its logits while logits are compared, with the allocator's rest."""
VERIFYING_RUNTIME_BYTES = 350 << 20
"""Memory of the process that verifies, which is forked, before any weight."""
LAYOUT_COPIES = 3
"""Copies of a tensor in float32 while it is laid out: as read, as converted, and its bytes. 2.2 measured."""
TOKENIZER_BYTES = 2000
"""Memory for each token of the vocabulary while a tokenizer is loaded: 1,900 measured with 262,144 tokens."""
TOKENIZER_REST_BYTES = 270
"""The allocator's rest of that in the process that waits, for each token."""
PROVEN_LOGITS = 14
"""Bytes of a logit while a window is compared with the whole model's: of both, and three copies in float32."""
PROVEN_POSITIONS = 24
"""Positions of that window."""
GENERATION_BYTES = 80 << 20
"""Memory of Transformers in addition to the model while it generates text."""
GENERATED_LOGIT_BYTES = 64
"""Bytes for each token of the vocabulary while eight texts are continued: two copies of their logits in float32."""
WHOLE_BYTES = 1 << 30
"""Largest size of a model that may be in memory as a whole to generate text.

A larger one may if the rest of its job needs as much memory.
"""
TASK_RUNTIME_BYTES = 350 << 20
"""Memory of lm-evaluation-harness and its imports, in addition to the runtime."""
TASK_TOKENS = 256
"""Assumed number of tokens of each document of a task, unknown before it is read."""
TASK_LOGIT_COPIES = 3
"""Copies of the logits of a batch of documents in float32."""
DEVICE_RUNTIME_BYTES = 1_500_000_000
"""Memory of an accelerator's context and the work space of its libraries."""

Parts = dict[str, int]


@dataclass(frozen=True)
class Footprint:
    """Quantities that determine a job's memory, in bytes.

    ``whole``: all tensors; ``outside``: embedding, head and everything else around the blocks, of which ``head`` is the
    output projection if it has its own weight; ``block``: the largest block; ``tensor``: the largest tensor;
    ``weight``: the largest weight to be rounded, in float32; ``grams``: one set of the matrices that calibration
    learns, for all inputs of a block; ``gram``: the matrices of the widest input; ``num_windows`` of a text determine
    the number of such sets during calibration; ``factors`` and ``solved``: the further matrices and the layers of the
    input that needs most memory while it is solved; ``codes``: those of a block, which its layers keep until it is
    written; ``window``: the widest input of one window, in float32; ``states``: the hidden states of all windows before
    a block; ``num_schemes`` are measured first, for a mix, which needs ``gradients``: those by the hidden states of all
    windows after a block. So does a job that ``needs_backward``. Both keep states before each of ``num_blocks``.
    ``outputs``: the second moments of the gradients by the outputs of a block's layers; ``coupled``, what solving the
    layers of one input adds to them. ``distilled`` and ``tuned``: the states and what tunes the scales in distillation;
    ``stepped``: the states of the windows of one of its steps before one block. ``autorounded``: what AutoRound holds
    to tune a block. ``stacks_experts``: the model is a mixture.

    The rest is for measuring the result: ``held_out``, the hidden states of all of its windows; ``logits``, those of
    ``LOGIT_ROWS`` positions; ``part``: a part of the head's weight and its logits (``engine.runtime.vocabulary``);
    ``restored_head``, the float32 weight of a quantized head; ``vocab_size``, the number of tokens; ``window_len``,
    those of a calibration window; ``probes``, the logits that are compared one by one; ``measures``: the original is
    compared with the result; ``generates``: both continue texts; ``task_logits``: those of a batch of documents, 0
    without tasks; ``num_values``: the number of values of all tensors. ``is_read``: another program reads an export.
    ``predicts_tokens``: the model has a head for them. ``laid_out``: the largest tensor in float32, if llama.cpp's
    converter lays out the file, else 0. ``kv_caches``: what measuring dtypes of the KV cache takes.
    """

    whole: int
    outside: int
    head: int
    block: int
    tensor: int
    weight: int
    grams: int
    gram: int
    num_windows: int
    factors: int
    solved: int
    codes: int
    window: int
    states: int
    num_schemes: int = 0
    gradients: int = 0
    needs_backward: bool = False
    distilled: int = 0
    tuned: int = 0
    stepped: int = 0
    autorounded: int = 0
    num_blocks: int = 0
    stacks_experts: bool = False
    outputs: int = 0
    coupled: int = 0
    held_out: int = 0
    logits: int = 0
    probes: int = 0
    part: int = 0
    restored_head: int = 0
    vocab_size: int = 0
    window_len: int = 0
    predicts_tokens: bool = True
    measures: bool = False
    generates: bool = False
    task_logits: int = 0
    num_values: int = 0
    is_read: bool = False
    laid_out: int = 0
    kv_caches: int = 0

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        headers: ModelHeaders,
        layers: tuple[LayerPlan, ...],
        blocks: Blocks,
        *,
        needs_calibration: bool,
        num_schemes: int = 0,
    ) -> Footprint:
        """Return the footprint of a job with these planned layers; ``spec.export`` names its formats."""
        config, calibration, evaluation = spec.config, spec.calibration, spec.evaluation
        tensors = headers.tensors
        sizes = by_block(blocks, {name: tensor.num_bytes for name, tensor in tensors.items()})
        num_tokens = calibration.num_samples * calibration.seq_len
        learns = needs_calibration or num_schemes > 0
        element = DTYPE_BYTES[tensors[f"{layers[0].name}.weight"].dtype]
        [(hidden, _)] = Counter(layer.in_features for layer in layers).most_common(1)  # most read the hidden states
        learned = [layer for layer in layers if not layer.is_embedding] or layers  # those that a solver sees
        grams, gram = grams_of(config, learned)
        factors, solved = solved_of(config, learned, element) if grams else (0, 0)
        widest = max(layer.in_features for layer in layers)
        beside = element * values_beside(layers, tensors)
        measures = evaluation.num_windows > 0
        num_distilled = 0 if config.distills is None else config.distills.num_windows + NUM_HELD_BACK
        vocab_size = vocab_size_of(tensors, blocks)
        predicts_tokens = ModelConfig(headers.config).predicts_tokens
        held_out = max(evaluation.num_windows, NUM_PROBES) * evaluation.held_out_len * (hidden * element + beside)
        return cls(
            whole=sum(sizes.values()),
            outside=sizes[-1],
            head=sum(tensor.num_bytes for name, tensor in tensors.items() if is_head(name)),
            block=max(sizes[index] for index in range(len(blocks))),  # later blocks do not run
            tensor=max(tensor.num_bytes for tensor in tensors.values()),
            weight=4 * max(math.prod(layer.shape) for layer in layers),
            grams=grams,
            gram=gram,
            num_windows=calibration.num_samples,
            factors=factors,
            solved=solved,
            codes=most_weights(learned),  # a byte each
            window=4 * widest * max(calibration.seq_len * learns, evaluation.held_out_len),
            states=((1 + config.compares) * hidden * element + beside) * num_tokens * needs_calibration,
            num_schemes=num_schemes,
            gradients=num_tokens * hidden * element,
            needs_backward=config.needs_backward,
            distilled=2 * calibration.seq_len * hidden * element * num_distilled,
            tuned=sum(bytes_of_scales(layers).values()) if num_distilled else 0,
            stepped=WINDOWS_PER_STEP * calibration.seq_len * hidden * element * bool(num_distilled),
            autorounded=AUTOROUND_BYTES * most_weights(learned) if config.autorounds is not None else 0,
            num_blocks=len(blocks),
            stacks_experts=bool(ModelConfig(headers.config).num_experts),
            outputs=outputs_of(learned) if config.needs_backward else 0,
            coupled=coupled_of(learned) if config.needs_backward else 0,
            held_out=held_out,
            kv_caches=bytes_of_caches(evaluation, headers, held_out),
            logits=min(LOGIT_ROWS, evaluation.held_out_len) * vocab_size * element,
            probes=4 * NUM_PROBES * PROBE_POSITIONS * vocab_size,
            part=element
            * min(vocab_size, part_size(hidden, on_host=True))
            * (hidden + min(PART_ROWS, evaluation.held_out_len)),
            restored_head=4 * max((math.prod(layer.shape) for layer in layers if layer.block is None), default=0),
            vocab_size=vocab_size,
            window_len=calibration.seq_len,
            predicts_tokens=predicts_tokens,
            measures=measures,
            generates=measures
            and predicts_tokens
            and evaluation.num_prompts + evaluation.num_answers + evaluation.num_behaviour_prompts > 0,
            is_read=any(unread(export, layers) is None for export in spec.export),
            laid_out=laid_out_of(spec.export, headers),
            num_values=sum(math.prod(tensor.shape) for tensor in tensors.values()),
            task_logits=4 * evaluation.batch_size * TASK_TOKENS * vocab_size * bool(evaluation.tasks),
        )

    def file_to_file(self) -> Parts:
        """Return the memory of file to file: one weight, or a tensor to copy."""
        return {"runtime": RUNTIME_BYTES, **_larger(*self._weight_by_weight())}

    def _weight_by_weight(self) -> tuple[Parts, ...]:
        rounding = {"one_weight": self.weight // 2, "one_weight_in_float32": FLOAT_COPIES * self.weight}
        return rounding, {"one_tensor": self.tensor}

    def streamed(self, *, num_ranks: int = 1, num_shards: int = 1) -> Parts:
        """Return the memory of each of ``num_ranks`` that share the windows, with a block in ``num_shards`` shards.

        One layer is in memory whole, twice: FSDP2 gathers it, then copies it into its layout. If ``allows_comparison``,
        one window goes through the whole model before the first block.

        The statistics of an input are summed on the rank that solves it. So a rank holds its own statistics, and the
        sums for the inputs that it solves, counted as the widest one plus the rank's share of all.
        """
        moments = self._moments(num_ranks, num_shards)
        if self.allows_comparison(num_ranks):
            moments += (self._comparing(),)
        held_out = self.held_out // num_ranks + self.held_out  # its share, and at the end the states of all ranks
        states = {"activations": self.states // num_ranks, "held_out_states": held_out}
        if self.needs_backward:
            states["gradients"] = min(KEPT_STATES_BYTES, self.all_states // num_ranks)
        if self.distilled:
            states["distillation"] = self.distilled + self.tuned + min(KEPT_STATES_BYTES, self.all_stepped)
        return {"runtime": RUNTIME_BYTES, **_larger(*moments), **states}

    @property
    def all_states(self) -> int:
        """The bytes of the hidden states of all windows before every block and after the last one."""
        return (1 + self.num_blocks) * self.gradients

    @property
    def all_stepped(self) -> int:
        """The bytes of the hidden states of a step's windows before every block and after the last one."""
        return (1 + self.num_blocks) * self.stepped

    def allows_comparison(self, num_ranks: int = 1) -> bool:
        """Return True if one window may go through the whole model before the first block.

        It may if the model is small, or needs no more memory than each of ``num_ranks`` needs anyway.
        """
        needed = max(map(_size, self._moments(num_ranks, num_shards=num_ranks)))
        return _size(self._comparing()) <= max(WHOLE_BYTES, needed)

    def _comparing(self) -> Parts:
        products = {"products": PRODUCT_TILES * TILE_BYTES}
        logits = {"logits": PROVEN_LOGITS * PROVEN_POSITIONS * self.vocab_size}
        whole = {"whole_model": self.whole, "embedding_and_head": self.outside, "one_block": self.block}
        return whole | logits | products | self._stacked(self.whole)

    def _moments(self, num_ranks: int = 1, num_shards: int = 1) -> tuple[Parts, ...]:
        """Return the moments of a rank that quantizes, without those that hold a whole model."""
        block = self.block if num_shards == 1 else self.block // num_shards + 2 * self.weight // 2
        rounding = FLOAT_COPIES * self.weight
        learning = count_sums(self.num_windows, num_ranks) * (self.grams + self.outputs)
        copies = WINDOW_COPIES_BACK if self.needs_backward or self.distilled else WINDOW_COPIES
        solved = min(self.grams, self.gram + self.grams // num_ranks) + self.outputs + self.coupled
        rounded = {"one_block": block, "codes": self.codes}
        moments: tuple[Parts, ...] = (
            self._tokenizer,
            {"embedding_and_head": self.outside, "logits": 4 * self.probes, "products": PRODUCT_TILES * TILE_BYTES},
            {"one_block": block, "statistics": learning, "one_window": copies * self.window},
            rounded | {"statistics": solved, "one_weight_in_float32": rounding},
            rounded | {"statistics": solved + self.factors, "layers_of_one_input": self.solved},
        )
        if num_ranks > 1:
            moments += ({"one_block": block, "statistics": self.grams + solved},)
        if self.num_schemes or self.needs_backward or self.distilled:
            moments += (self._measuring(),)
        if self.num_schemes or self.needs_backward:
            logits = {"logits": LOGIT_BYTES_BACK * self.window_len * self.vocab_size}
            moments += ({"embedding_and_head": self.outside} | logits,)
        if self.autorounded:
            window = {"one_window": WINDOW_COPIES_BACK * self.window}
            statistics = {"statistics": self.grams + self.outputs}
            moments += ({"one_block": block, "tuned_block": self.autorounded} | statistics | window,)
        if self.distilled:
            logits = {"logits": DISTILLED_LOGITS * self.logits, "products": PRODUCT_TILES * TILE_BYTES}
            moments += ({"embedding_and_head": self.outside} | logits,)
        return moments

    def verifying(self, *, runs_model: bool) -> Parts:
        """Return the memory of the fresh process that verifies and of the one that waits.

        It holds one weight or one block, then parts of the heads of both models; a whole model only if
        ``allows_whole``.
        """
        waiting = {"waiting_process": RUNTIME_BYTES + TOKENIZER_REST_BYTES * self.vocab_size * runs_model}
        moments = self._bounded(runs_model=runs_model)
        if runs_model and self.allows_whole(runs_model=runs_model):
            moments += self._whole()
        if self.allows_check(runs_model=runs_model):
            moments += (self._checking(),)
        if self.laid_out:  # before the file is verified
            moments += ({"tensor_to_lay_out": LAYOUT_COPIES * self.laid_out},)
        held_out = {"held_out_states": (1 + self.measures) * self.held_out} if runs_model else {}
        return {**waiting, "runtime": VERIFYING_RUNTIME_BYTES, **_larger(*moments), **held_out}

    def allows_whole(self, *, runs_model: bool) -> bool:
        """Return True if the whole model may be in memory.

        It may if tasks run on it, it is small, or the job needs as much memory anyway.
        """
        needed = max(map(_size, (*self._moments(), *self._bounded(runs_model=runs_model))))
        return runs_model and (self.task_logits > 0 or self.whole <= max(WHOLE_BYTES, needed))

    def allows_check(self, *, runs_model: bool) -> bool:
        """Return True if another program may read the whole export: it is small, or needs no more than verifying."""
        limit = max(WHOLE_BYTES, *map(_size, self._bounded(runs_model=runs_model)))
        return self.is_read and _size(self._checking()) <= limit

    def _checking(self) -> Parts:
        """Return the memory while another program reads the export: the model in float32, and the files."""
        products = {"products": PRODUCT_TILES * TILE_BYTES}
        whole = {"whole_model_in_float32": 4 * self.num_values, "export": self.whole}
        return whole | products | self._stacked(4 * self.num_values)

    def _stacked(self, whole: int) -> Parts:
        """Return the memory of the experts of a model, once more: Transformers reads all, then stacks them."""
        return {"stacked_experts": whole} if self.stacks_experts else {}

    def _bounded(self, *, runs_model: bool) -> tuple[Parts, ...]:
        """Return the moments of the process that verifies, without those that hold a whole model."""
        moments = self._weight_by_weight()
        if not runs_model:
            return moments
        window = {"one_window": WINDOW_COPIES * self.window}
        products = {"products": PRODUCT_TILES * TILE_BYTES}
        running = {"one_block": self.block, "one_weight_in_float32": FLOAT_COPIES * self.weight}
        num_models = 1 + self.measures
        heads = {"parts_of_heads": PART_COPIES * num_models * self.part, "restored_head": self.restored_head}
        if not self.predicts_tokens:
            heads = {"embeddings_and_heads": num_models * self.outside}
        return (
            *moments,
            running | window,
            self._tokenizer,
            {"embedding": self.outside - self.head, "logits": self.probes} | products,
            heads | {"logits": 3 * self.probes} | products,
            *(part | {"kv_caches": self.kv_caches} for part in (running | window, heads | products) if self.kv_caches),
        )

    @property
    def _tokenizer(self) -> Parts:
        return {"tokenizer": TOKENIZER_BYTES * self.vocab_size}

    def _whole(self) -> tuple[Parts, ...]:
        """Return the moments in which the original, then the result, is loaded, and generates text or does tasks."""
        whole = {"whole_model": self.whole}
        loading = {"one_weight_in_float32": FLOAT_COPIES * self.weight}
        samples = {"generation": GENERATION_BYTES + GENERATED_LOGIT_BYTES * self.vocab_size}
        tasks = {
            "products": 4 * self.tensor,  # the largest matrix in float32 twice: the harness runs Transformers' own code
            "task_runtime": TASK_RUNTIME_BYTES,
            **self._tokenizer,
            "task_logits": TASK_LOGIT_COPIES * self.task_logits,
        }
        uses = (*[samples] * self.generates, *[tasks] * bool(self.task_logits))
        return tuple(whole | use for use in (loading, *uses)) if uses else ()

    def _measuring(self) -> Parts:
        """Return the memory of a pass backward: a window through a block, and each measured scheme's changes to it."""
        return {
            "one_block": self.block,
            "changes_of_one_block": self.num_schemes * self.block,
            "gradients": self.gradients,
            "one_window": WINDOW_COPIES_BACK * self.window,
            "one_weight_in_float32": 2 * self.weight,
        }

    def resident(self, *, num_ranks: int) -> Parts:
        """Return the memory of each rank to run the whole model in shards (FSDP2), not to calibrate.

        Two blocks are gathered at a time.
        """
        shards = {"shard_of_the_model": self.whole // num_ranks, "two_blocks": 2 * self.block}
        return {"runtime": RUNTIME_BYTES, **shards, "one_window": WINDOW_COPIES * self.window}

    def host(self) -> Parts:
        """Return each rank's memory on the host of an accelerator: a tensor to be copied there, floats to be hashed."""
        return {"runtime": RUNTIME_BYTES, "one_tensor": self.tensor, "one_weight_in_float32": self.weight}


def by_block(blocks: Blocks, sizes: Mapping[str, int]) -> Counter[int]:
    """Return the sums of the tensors' ``sizes`` by the number of the block; -1 is outside the blocks."""
    sums = Counter[int]()
    for name, size in sizes.items():
        number = blocks.number_of(name)
        sums[-1 if number is None else number] += size
    return sums


def _larger(*moments: Parts) -> Parts:
    return max(moments, key=_size)


def _size(parts: Parts) -> int:
    return sum(parts.values())
