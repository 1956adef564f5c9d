"""Distillation of scales: the codes stay, and the scales are tuned for the least divergence from the float model.

This is the last stage of EfficientQAT (Chen et al. 2024, "E2E-QP", arXiv:2407.11062), with step sizes as parameters as
in LSQ (Esser et al. 2019, arXiv:1902.08153). The gradient of a scale's logarithm is the sum of gradient times weight
over its group. One step takes a few windows forward and backward through the quantized model, block by block: memory
holds one block, the windows' states before every block, and for each scale its factor and Adam's two moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional

from quantcore.config.algorithms import DistillConfig
from quantcore.config.grouping import weight_grouping
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.blockwise.backward import BackwardPass, Gradients
from quantcore.engine.blockwise.results import Solved
from quantcore.engine.blockwise.savepoint import SavePoint
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.engine.runtime.weight_loader import ReadTensor
from quantcore.formats.weight_layout import canonical, stored
from quantcore.plan.workload import LOGIT_ROWS, WINDOWS_PER_STEP
from quantcore.tensors.affine import QParams, as_stored
from quantcore.tensors.qtensor import QTensor

PARTS = ("codes", "scale", "zero_point")
TUNING = "tuning"

Logits = Callable[[torch.Tensor], torch.Tensor]
Tell = Callable[[int, int], None]
"""Callback that gets the number of steps done, before the first step too, and the number of all."""


@dataclass(frozen=True)
class Distilled:
    """The mean KL divergence in nats per token on held-back windows, before tuning and after it."""

    kl_before: float
    kl_after: float

    @property
    def is_kept(self) -> bool:
        """True if tuning gained on the held-back windows; otherwise the result has the scales of the solver."""
        return self.kl_after < self.kl_before


class CodeFiles:
    """The codes of all solved layers in ``folder``, one file for each layer. They are read to ``device``."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, solved: Solved) -> None:
        quantized = solved.quantized
        parts = (quantized.codes, quantized.params.scale, quantized.params.zero_point)
        tensors = {name: part.cpu().contiguous() for name, part in zip(PARTS, parts, strict=True) if part is not None}
        path = self._path(solved.layer)
        save_file(tensors, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def read(self, layer: LayerPlan) -> QTensor:
        with safe_open(self._path(layer), "pt") as file:
            names = file.keys()  # it is no mapping
            found = {name: file.get_tensor(name).to(self._device) for name in names}
        return QTensor(found["codes"], QParams(found["scale"], found.get("zero_point")), layer.weight)

    def _path(self, layer: LayerPlan) -> Path:
        return self._folder / f"{layer.name}.safetensors"


class Student:
    """The quantized ``model``: the codes of ``layers``, and a factor for each of their scales.

    ``read`` returns the other tensors. ``model`` computes as the student inside ``running``.
    """

    def __init__(self, model: StreamedModel, layers: Sequence[LayerPlan], codes: CodeFiles, read: ReadTensor) -> None:
        self.model = model
        self._layers = {f"{layer.name}.weight": layer for layer in layers}
        self._by_block: dict[int | None, list[LayerPlan]] = {}
        for layer in layers:
            self._by_block.setdefault(layer.block, []).append(layer)
        self._codes = codes
        self._read_float = read
        self.log_factors = {layer.name: torch.zeros_like(codes.read(layer).params.scale) for layer in layers}
        """By layer, the logarithms [R, G] of the factors by which scales are multiplied."""

    def quantized(self, layer: LayerPlan, *, as_in_files: bool = True) -> QTensor:
        """Return the layer with its factors applied; its scales are rounded to their stored type if ``as_in_files``."""
        solved = self._codes.read(layer)
        factors = self.log_factors[layer.name]
        scale = solved.params.scale * factors.exp()
        if as_in_files:
            scale = torch.where(factors == 0, solved.params.scale, as_stored(scale, layer.weight, self.model.dtype))
        return replace(solved, params=replace(solved.params, scale=scale))

    @contextmanager
    def running(self, *, as_in_files: bool = True) -> Iterator[None]:
        """Let the model read the weights of the student inside the block."""

        def read(name: str) -> torch.Tensor:
            layer = self._layers.get(name)
            if layer is None:
                return self._read_float(name)
            restored_OI = self.quantized(layer, as_in_files=as_in_files).dequantize()
            return stored(restored_OI.to(self.model.dtype), layer.kind)

        with self.model.reading(read):
            yield

    def gradients(
        self, ids_NT: torch.Tensor, teacher: Sequence[torch.Tensor], folder: Path
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the mean divergence of windows, and its gradients [R, G] by the logarithms of all factors.

        ``teacher``: the float model's states [1, T, H] after its last block, one for each window.
        """
        sums = {name: torch.zeros_like(factors) for name, factors in self.log_factors.items()}
        with self.running(as_in_files=False):
            passed = BackwardPass(self.model, self.model.embed(ids_NT), folder, lambda done, total: None)
            losses, behind = [], []
            with self.model.head() as logits:
                for state, of_teacher in zip(passed.states_before(passed.num_blocks), teacher, strict=True):
                    loss, gradient = divergence_and_gradient(logits, state, of_teacher)
                    losses.append(loss / ids_NT.numel())
                    behind.append(gradient / ids_NT.numel())
            for index, block, gradients in passed.blocks_behind(behind):
                layers = {layer.name: layer for layer in self._by_block.get(index, ())}
                modules = {name: self.model.find_module(name) for name in layers}
                for window in range(passed.num_windows):
                    for call in passed.through(block, index, window, modules, gradients):
                        layer = layers[call.name]
                        weight_OI = canonical(modules[call.name].get_parameter("weight").data, layer.kind)
                        with matmul_precision(weight_OI.device):
                            change_OI = Gradients(call, weight_OI).of_weight.float() * weight_OI
                        change_RGS = weight_grouping(layer.weight).split(change_OI)
                        sums[call.name] += change_RGS.sum(-1)
        return math.fsum(losses), sums


def last_states(model: StreamedModel, hidden: Hidden) -> Sequence[torch.Tensor]:
    """Take windows through all blocks of the model as it reads now; returns their states [1, T, H]."""
    for index in range(model.num_blocks):
        with model.block(index) as block:
            model.run_block(block, index, hidden)
    return hidden.states


def divergence(model: StreamedModel, states: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> float:
    """Return the mean KL divergence in nats per token of the predictions after ``states`` from the ``teacher``'s."""
    total, num_tokens = 0.0, 0
    with model.head() as logits, torch.no_grad():
        for state, of_teacher in zip(states, teacher, strict=True):
            for rows in _rows(state):
                total += _divergence(logits(of_teacher[:, rows]), logits(state[:, rows])).item()
            num_tokens += state.shape[1]
    return total / num_tokens


def divergence_and_gradient(logits: Logits, state: torch.Tensor, teacher: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return the sum of a window's divergences over its tokens, and the gradient by its ``state`` [1, T, H]."""
    gradient, total = torch.empty_like(state), 0.0
    for rows in _rows(state):
        part = state[:, rows].clone().requires_grad_()
        with torch.no_grad():
            of_teacher = logits(teacher[:, rows])
        with torch.enable_grad():
            loss = _divergence(of_teacher, logits(part))
            (gradient[:, rows],) = torch.autograd.grad(loss, part)
        total += loss.item()
    return total, gradient


def tune(
    student: Student,
    options: DistillConfig,
    ids_NT: torch.Tensor,
    teacher: Sequence[torch.Tensor],
    folder: Path,
    savepoint: SavePoint,
    tell: Tell,
) -> None:
    """Tune the factors of the student's scales on windows of token ids; the learning rate falls to 0 (cosine).

    The factors and their moments are kept in the ``savepoint``, from which a job that resumes goes on.
    """
    factors = list(student.log_factors.values())
    optimizer = torch.optim.Adam(factors, lr=options.lr)
    states = [
        {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(log), "exp_avg_sq": torch.zeros_like(log)}
        for log in factors
    ]
    optimizer.state.update(zip(factors, states, strict=True))
    tuned = factors + [state[moment] for state in states for moment in ("exp_avg", "exp_avg_sq")]
    generator = torch.Generator().manual_seed(options.seed)
    batches = [
        batch
        for _ in range(options.epochs)
        for batch in torch.split(torch.randperm(len(ids_NT), generator=generator), WINDOWS_PER_STEP)
    ]
    first = savepoint.kept(TUNING, tuned)
    for state in states:
        state["step"].fill_(first)
    tell(first, len(batches))
    for step, batch in enumerate(batches[first:], first):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * 0.5 * (1 + math.cos(math.pi * step / len(batches)))
        _, gradients = student.gradients(ids_NT[batch], [teacher[window] for window in batch.tolist()], folder)
        for log, gradient in zip(factors, gradients.values(), strict=True):
            log.grad = gradient
        optimizer.step()
        tell(step + 1, len(batches))
        savepoint.keep(TUNING, step + 1, tuned)


def _rows(state: torch.Tensor) -> list[slice]:
    return [slice(start, start + LOGIT_ROWS) for start in range(0, state.shape[1], LOGIT_ROWS)]


def _divergence(of_teacher: torch.Tensor, of_student: torch.Tensor) -> torch.Tensor:
    """Return the sum of KL(teacher || student) over the tokens, from logits [1, T, V]."""
    log_p, log_q = (functional.log_softmax(logits.float(), -1) for logits in (of_teacher, of_student))
    return functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
