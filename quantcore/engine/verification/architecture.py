"""Proves, before a job's first block, that running a model block by block computes what Transformers computes.

Every architecture passes arguments to its blocks in its own way. If we misread it, the whole result would be wrong
without an error. So a small twin of the model (see ``engine.model.tiny_model``) runs in both, window by window; and if
the model fits into memory, so does one window of the model itself.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quantcore.checkpoint.experts import EXPERT
from quantcore.checkpoint.private_copies import opened_weights
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.model import EvaluatedModel, open_model
from quantcore.engine.model.kinds import Kind, inputs_of, language_model, model_class, num_tokens, outputs_of
from quantcore.engine.model.parameter_names import FROM_FILE_TO_FILE
from quantcore.engine.model.skeleton import clean_config
from quantcore.engine.model.tiny_model import build_tiny_model, tiny_config
from quantcore.engine.runtime.arguments import Arguments
from quantcore.engine.runtime.block_capture import no_chain
from quantcore.engine.runtime.devices import release_freed_memory
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.engine.runtime.states import packed
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.engine.verification.consumer import quiet
from quantcore.errors import ModelError, QuantError, reason_of
from quantcore.events import Emit, Warned
from quantcore.importing.model import Model, read_model
from quantcore.tensors.source import TORCH_DTYPES

NUM_WINDOWS = 3
MAX_TRIES = 3
WINDOW_LEN = 24
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Upper bounds on ``differences``, far below those that a wrong argument causes.

The same kernels in the same order give 0; experts that run one by one are summed in another order.
"""
NOT_FINITE = "its logits are not finite"


def prove_tiny_model(model: Model, emit: Emit) -> list[str]:
    """Return the linear layers in the blocks that the model never calls, as a small twin of it shows.

    Some are for tokens of an encoder that is not there; of others only the weight is read (Mamba's ``dt_proj``).
    Raises ModelError ``architecture_misread`` if the twin's logits differ. If Transformers cannot build or run one,
    a warning says that nothing was proven.
    """
    config = model.headers.config
    cache, twin = BaselineCache(f"twin:{config.get('model_type')}"), json.dumps(tiny_config(config), sort_keys=True)
    result = cache.value({"twin": twin}, lambda: _compare_twin(twin))
    if "reason" in result:
        _not_proven(config, f"Transformers could not run a small twin of it ({result['reason']})", emit)
        return []
    _check(config, result["differences"], torch.float32)
    uncalled: list[str] = result["uncalled"]
    return uncalled


def prove_window(model: Model, cache: BaselineCache, emit: Emit) -> None:
    """Compare one window of the model itself, which Transformers loads as a whole. Raises as ``prove_tiny_model``.

    Raises ModelError ``float_overflow`` for a model that gives numbers in a wider dtype alone.
    """
    config, dtype = model.headers.config, TORCH_DTYPES[model.headers.main_dtype]
    result = cache.value({"window": WINDOW_LEN}, lambda: _compare_whole(model, dtype))
    release_freed_memory()
    if "works_in" in result:
        raise _overflows(config, dtype, result["works_in"])
    if "reason" in result:
        _not_proven(config, f"Transformers could not load or run it ({result['reason']})", emit)
        return
    _check(config, result["differences"], dtype)


def differences(whole: PreTrainedModel, model: EvaluatedModel, windows_NT: torch.Tensor) -> list[float]:
    """Return the largest ||difference|| / ||values|| of every window, compared with the ``whole`` model.

    It compares the inputs of the first block, the outputs of each block for the inputs that it has in the whole model,
    and the logits. Each block starts from the same states, so that rounding errors do not add up with the depth. Raises
    ModelError for a model whose later blocks, or whose head, read more of earlier blocks than the last one's output.
    """
    streamed = model.streamed
    hidden = streamed.embed(windows_NT)
    expected = [_run_whole(whole, streamed, window_T) for window_T in windows_NT]
    by_window: list[list[float]] = [[] for _ in expected]
    with torch.no_grad():
        for index in range(streamed.num_blocks):
            if index in streamed.starts:
                for window, reference in enumerate(expected if index else ()):
                    hidden.states[window] = reference.outputs[index - 1]
                streamed.enter(index, hidden)
                for window, reference in enumerate(expected):
                    by_window[window].append(_difference(hidden.states[window], reference.inputs[index]))
            with streamed.block(index) as block:
                for window, reference in enumerate(expected):
                    got = hidden.run_on(reference.inputs[index], block, index, window)
                    by_window[window].append(_difference(got, reference.outputs[index]))
                    if by_window[window][-1] > MAX_DIFFERENCE[whole.dtype]:
                        kept = hidden.arguments.of_window[window][index - hidden.arguments.start]
                        _check_arguments(block, index, kept, reference.arguments[index])
            streamed.note_returned(index, hidden)
        model.has_run = True
        with model.head() as head, matmul_precision(streamed.device):
            for window, reference in enumerate(expected):
                logits = head(reference.outputs[-1])
                by_window[window].append(_difference(logits, reference.logits))
                is_other = by_window[window][-1] > MAX_DIFFERENCE[whole.dtype]
                if is_other and not torch.equal(head(reference.outputs[-1], windows_NT[window][None]), logits):
                    raise no_chain("its head reads more than the output of the last block")
    return [_worst(window) for window in by_window]


@dataclass(frozen=True)
class _Whole:
    """The result of a window in Transformers: hidden states before and after every block, and logits.

    ``arguments``: those of every block that ran.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    arguments: dict[int, Arguments]
    logits: torch.Tensor


def _run_whole(whole: PreTrainedModel, streamed: StreamedModel, window_T: torch.Tensor) -> _Whole:
    """Run one window in Transformers. Raises ModelError if a block's input is not the output of the block before it.

    A block that the model skips gives that output on.
    """
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    arguments: dict[int, Arguments] = {}

    def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any, index: int) -> None:
        skipped = [outputs[-1]] * (index - len(outputs)) if outputs else []
        arguments[index] = Arguments(args[1:], named if args else dict(list(named.items())[1:]))
        inputs.extend([*skipped, packed(args[0] if args else next(iter(named.values())), streamed.axes)])
        outputs.extend([*skipped, packed(output[0] if isinstance(output, (tuple, list)) else output, streamed.axes)])

    with ExitStack() as stack, torch.no_grad(), matmul_precision(whole.device):
        for index in range(streamed.num_blocks):
            block = whole.get_submodule(streamed.block_name(index))
            stack.callback(block.register_forward_hook(partial(note, index=index), with_kwargs=True).remove)
        reader = language_model(whole, streamed.kind)
        logits = outputs_of(reader(**inputs_of(reader, streamed.kind, window_T[None].to(whole.device))))
    for states in (inputs, outputs):
        states.extend(outputs[-1:] * (streamed.num_blocks - len(states)))
    pairs = zip(outputs[:-1], inputs[1:], strict=True)
    are_chained = [torch.equal(*pair) for index, pair in enumerate(pairs, 1) if index not in streamed.starts]
    if len(inputs) != streamed.num_blocks or not all(are_chained):
        raise no_chain("it computes something between its blocks")
    return _Whole(inputs, outputs, arguments, logits)


def _check_arguments(block: nn.Module, index: int, ours: Arguments, theirs: Arguments) -> None:
    """Raise ModelError if block ``index`` gets other numbers from Transformers than from us.

    While we record the arguments, blocks return what they are given: a model that keeps outputs of blocks for later
    ones (Inkling 2) then keeps something else.
    """
    names = list(inspect.signature(block.forward).parameters)[1:]
    before, after = (dict(zip(names, each.positional, strict=False)) | each.named for each in (ours, theirs))
    for name, value in after.items():
        kept = before.get(name)
        if isinstance(value, torch.Tensor) and isinstance(kept, torch.Tensor) and not torch.equal(kept, value):
            raise no_chain(f"'{name}', an argument of block {index}, is computed from the outputs of earlier blocks")


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return float((got.float() - expected).norm() / expected.norm())


def _worst(values: Sequence[float]) -> float:
    """Return the largest difference; NaN counts as larger than any."""
    return max(values, key=lambda value: value if value == value else float("inf"))


@cache  # a process, such as a test's, may run many jobs on models of the same config
def _compare_twin(config: str) -> dict[str, Any]:
    """Return ``differences``, or the ``reason`` why there are none. Both, and the twin's ``config``, are JSON data.

    By rounding, a router may choose another of two equally good experts. That is rare, so a twin with other weights
    decides.
    """
    result: dict[str, Any] = {}
    for seed in range(MAX_TRIES):
        result = _compare_twin_of(json.loads(config), seed)
        if "reason" in result or _worst(result["differences"]) <= MAX_DIFFERENCE[torch.float32]:
            break
    return result


def _compare_twin_of(config: dict[str, Any], seed: int) -> dict[str, Any]:
    try:
        built, kind = model_class(clean_config(config), config)
        twin = build_tiny_model(config, seed, built)
        windows_NT = _windows(twin, NUM_WINDOWS)
        if not _gives_numbers(twin, kind, windows_NT):
            return {"reason": NOT_FINITE}
        with tempfile.TemporaryDirectory(prefix="bitfoundry-twin-") as folder, quiet():
            twin.save_pretrained(folder)
            ours = open_model(read_model(Path(folder)))
            twin.train(False).to(ours.streamed.device)
            with _calls(twin) as called:
                measured = differences(twin, ours, windows_NT)
            return {"differences": measured, "uncalled": _uncalled(twin, ours.streamed, called)}
    except ModelError as error:
        if error.code == "missing_tensors":  # Transformers wrote these files: they are whole
            raise ModelError(
                f"Checkpoints of this type store tensors in an unsupported layout: {error.message}",
                code="unsupported_architecture",
                hint=FROM_FILE_TO_FILE,
            ) from error
        if error.code == "unsupported_architecture":
            raise
        return {"reason": reason_of(error)}
    except (QuantError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the code of any model, on untested inputs
        return {"reason": reason_of(error)}


@contextmanager
def _calls(model: PreTrainedModel) -> Iterator[set[str]]:
    """Yield the set that gains the names of the linear layers of ``model`` that are called while this lasts."""
    called: set[str] = set()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D):
                stack.callback(module.register_forward_hook(lambda *_, name=name: called.add(name)).remove)
        yield called


def _uncalled(model: PreTrainedModel, streamed: StreamedModel, called: set[str]) -> list[str]:
    """Return the checkpoint's names of the linear layers in the blocks that were not called, but for experts."""
    blocks = tuple(f"{streamed.block_name(index)}." for index in range(streamed.num_blocks))
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    stored = [
        streamed.stored_name(f"{name}.weight") for name in linears if name.startswith(blocks) and name not in called
    ]
    return [name.removesuffix(".weight") for name in stored if not EXPERT.match(name)]


def _compare_whole(model: Model, dtype: torch.dtype) -> dict[str, Any]:
    streamed = open_model(model)
    try:
        with quiet(), opened_weights(model.folder) as folder:
            config = clean_config(model.headers.config)
            whole = type(streamed.streamed.model).from_pretrained(
                folder, config=config, dtype=dtype, use_safetensors=True, local_files_only=True
            )
        whole.train(False).to(streamed.streamed.device)
        windows_NT = _windows(whole, 1)
        if not _gives_numbers(whole, streamed.streamed.kind, windows_NT):
            wider = torch.bfloat16 if dtype is torch.float16 else torch.float32
            nn.Module.to(whole, wider)
            if dtype is not wider and _gives_numbers(whole, streamed.streamed.kind, windows_NT):
                return {"reason": NOT_FINITE, "works_in": str(wider).removeprefix("torch.")}
            return {"reason": NOT_FINITE}
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the model's own code, on its own numbers
        return {"reason": reason_of(error)}
    return {"differences": differences(whole, streamed, windows_NT)}


def _gives_numbers(model: PreTrainedModel, kind: Kind, windows_NT: torch.Tensor) -> bool:
    reader = language_model(model, kind)
    with torch.no_grad():
        logits = outputs_of(reader(**inputs_of(reader, kind, windows_NT[:1].to(model.device))))
    return bool(logits.isfinite().all())


def _windows(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Return token ids [N, T], different in every window."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(num_tokens(model), (count, WINDOW_LEN), generator=generator)


def _check(config: dict[str, Any], measured: Sequence[float], dtype: torch.dtype) -> None:
    worst = _worst(measured)
    if worst <= MAX_DIFFERENCE[dtype]:
        return
    raise ModelError(
        f"Run block by block, this '{config.get('model_type')}' model does not match Transformers: hidden states or "
        f"logits differ by {worst:.2g} of their norm; the limit is {MAX_DIFFERENCE[dtype]:.0e}.",
        code="architecture_misread",
        hint="Bitfoundry does not support this architecture correctly yet. Please report this as a bug. "
        f"{FROM_FILE_TO_FILE}",
    )


def _overflows(config: dict[str, Any], dtype: torch.dtype, works_in: str) -> ModelError:
    stored = str(dtype).removeprefix("torch.")
    return ModelError(
        f"This '{config.get('model_type')}' model overflows in {stored}: Transformers computes non-finite logits. "
        f"In {works_in} they are finite.",
        code="float_overflow",
        hint=f"Convert it first: from_pretrained(MODEL, dtype='{works_in}').save_pretrained(FOLDER), and serve the"
        f" result in {works_in}.",
    )


def _not_proven(config: dict[str, Any], why: str, emit: Emit) -> None:
    emit(
        Warned(
            "architecture_not_proven",
            f"This '{config.get('model_type')}' model, run block by block, was not proven to match Transformers: "
            f"{why}.",
        )
    )
