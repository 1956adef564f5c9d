"""Proof, before a job's first block, that running a model block by block computes what Transformers computes.

Every architecture has its own way of handing things to its blocks. Where our reading of it is wrong, everything that
follows would be wrong and look done. So a small twin of the model (see ``blocks.twin``) goes through both, window by
window; and where the model fits into memory, so does one window of the model itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from quantcore.blocks.skeleton import clean_config
from quantcore.blocks.twin import build_twin, twin_config
from quantcore.checkpoint.source import TORCH_DTYPES
from quantcore.errors import ModelError, QuantError, short
from quantcore.evaluation.model import EvaluatedModel, open_model
from quantcore.evaluation.originals import Originals
from quantcore.events import Emit, Warned
from quantcore.reading import Model, read_model
from quantcore.runtime.products import products_on

NUM_WINDOWS = 3
WINDOW_LEN = 24
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Norm of the difference of the logits over the norm of the logits. The same kernels in the same order give 0; experts
that run one by one are summed in another order. A wrong argument gives far more."""
NOT_FINITE = "its logits are not finite"


def prove_twin(model: Model, emit: Emit) -> None:
    """Raises ModelError ``architecture_misread`` if the twin's logits differ.

    Where Transformers cannot build or run such a twin, a warning says that nothing was proven.
    """
    config = model.headers.config
    known, twin = Originals(f"twin:{config.get('model_type')}"), json.dumps(twin_config(config), sort_keys=True)
    found = known.value({"twin": twin}, lambda: _compare_twin(twin))
    if "reason" in found:
        _not_proven(config, f"no small twin of it could be run by Transformers ({found['reason']})", emit)
        return
    _check(config, found["differences"], torch.float32)


def prove_window(model: Model, known: Originals, emit: Emit) -> None:
    """The same for one window of the model itself, all of which Transformers loads. Raises as ``prove_twin``."""
    config, dtype = model.headers.config, TORCH_DTYPES[model.headers.main_dtype]
    found = known.value({"window": WINDOW_LEN}, lambda: _compare_whole(model, dtype))
    if "reason" in found:
        _not_proven(config, f"Transformers could not load or run it ({found['reason']})", emit)
        return
    _check(config, found["differences"], dtype)


def differences(whole: PreTrainedModel, streamed: EvaluatedModel, windows_NT: torch.Tensor) -> list[float]:
    """||difference of the logits|| / ||logits|| of every window: the ``streamed`` model's against Transformers'."""
    found: list[float] = []
    hidden = streamed.streamed.embed(windows_NT)
    streamed.run(hidden, lambda done: None)
    with torch.no_grad(), streamed.head() as head, products_on(streamed.streamed.device):
        for window_T, state in zip(windows_NT, hidden.states, strict=True):
            expected = whole(input_ids=window_T[None].to(whole.device), use_cache=False).logits.float().cpu()
            found.append(((head(state).float().cpu() - expected).norm() / expected.norm()).item())
    return found


@cache  # many jobs of one process, such as a test's, are about models of one config
def _compare_twin(config: str) -> dict[str, Any]:
    """``differences``, or the ``reason`` for which there are none. JSON data, as is the twin's ``config``."""
    try:
        twin = build_twin(json.loads(config))
        windows_NT = _windows(twin, NUM_WINDOWS)
        if not _gives_numbers(twin, windows_NT):
            return {"reason": NOT_FINITE}
        with tempfile.TemporaryDirectory(prefix="bitfoundry-twin-") as folder, _no_progress_bars():
            twin.save_pretrained(folder)
            streamed = open_model(read_model(Path(folder)))
            return {"differences": differences(twin, streamed, windows_NT)}
    except ModelError as error:
        if error.code == "unsupported_architecture":
            raise
        return {"reason": short(error)}
    except (QuantError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the code of any model, on numbers that nobody tried
        return {"reason": short(error)}


def _compare_whole(model: Model, dtype: torch.dtype) -> dict[str, Any]:
    streamed = open_model(model)
    try:
        with _no_progress_bars():
            whole = AutoModelForCausalLM.from_pretrained(
                model.folder, config=clean_config(model.headers.config), dtype=dtype, use_safetensors=True,
                local_files_only=True,
            )  # fmt: skip
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        return {"reason": short(error)}
    whole.train(False).to(streamed.streamed.device)
    windows_NT = _windows(whole, 1)
    if not _gives_numbers(whole, windows_NT):
        return {"reason": NOT_FINITE}
    return {"differences": differences(whole, streamed, windows_NT)}


def _gives_numbers(model: PreTrainedModel, windows_NT: torch.Tensor) -> bool:
    with torch.no_grad():
        logits = model(input_ids=windows_NT[:1].to(model.device), use_cache=False).logits
    return bool(logits.isfinite().all())


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _windows(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Token ids [N, T], different in every window."""
    num_tokens = len(model.get_input_embeddings().get_parameter("weight"))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(num_tokens, (count, WINDOW_LEN), generator=generator)


def _check(config: dict[str, Any], found: Sequence[float], dtype: torch.dtype) -> None:
    worst = max(found, key=lambda one: one if one == one else float("inf"))
    if worst <= MAX_DIFFERENCE[dtype]:
        return
    raise ModelError(
        f"Run block by block, this '{config.get('model_type')}' model gives other logits than Transformers gives: they"
        f" differ by {worst:.2g} of their norm, where {MAX_DIFFERENCE[dtype]:.0e} is allowed.",
        code="architecture_misread",
        hint="Bitfoundry does not read this architecture correctly yet; please report it. Schemes that need no data"
        " work from file to file: --file2file_quantization.",
    )


def _not_proven(config: dict[str, Any], why: str, emit: Emit) -> None:
    emit(
        Warned(
            "architecture_not_proven",
            f"That this '{config.get('model_type')}' model, run block by block, computes what Transformers computes was"
            f" not proven: {why}.",
        )
    )
