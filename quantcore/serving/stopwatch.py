"""Runs in the environment of the program that serves the model (see ``inside_env``).

Measures the time to load a model, to read prompts and to generate after them, and the memory.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in this process, whose memory is measured
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Runtime(Protocol):
    """A program with a model loaded; ``module`` is the name of its Python module."""

    module: str
    vocab_size: int

    def run(self, prompts: list[list[int]], num_new: int) -> None:
        """Generate ``num_new`` tokens after each prompt; their values do not matter."""


class Transformers:
    """Runs all prompts as one batch through ``generate``."""

    module = "transformers"

    def __init__(self, task: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_num_threads(task["num_threads"])
        model: Any = AutoModelForCausalLM.from_pretrained(task["model"], dtype="auto")
        self._model = model.to(device).eval()
        self.vocab_size = self._model.get_input_embeddings().num_embeddings
        self._device, self._torch = device, torch

    def run(self, prompts: list[list[int]], num_new: int) -> None:
        ids = self._torch.tensor(prompts, device=self._device)
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                min_new_tokens=num_new,
                max_new_tokens=num_new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        if self._device == "cuda":
            self._torch.cuda.synchronize()


class Vllm:
    """Runs all prompts at a time."""

    module = "vllm"

    def __init__(self, task: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        length = task["prompt_len"] + task["num_new"]
        self._llm = LLM(
            task["model"],
            max_model_len=length,
            max_num_seqs=task["batch_size"],
            enable_prefix_caching=False,
            seed=0,
            kv_cache_dtype=task["kv_cache_dtype"],
        )
        self.vocab_size = self._llm.llm_engine.model_config.get_vocab_size()
        self._params = SamplingParams

    def run(self, prompts: list[list[int]], num_new: int) -> None:
        greedy = self._params(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)


class LlamaCpp:
    """Runs one prompt after the other: its bindings serve one sequence."""

    module = "llama_cpp"

    def __init__(self, task: dict[str, Any]) -> None:
        from llama_cpp import Llama

        length, threads = task["prompt_len"] + task["num_new"], task["num_threads"]
        self._llm = Llama(
            task["model"],
            n_ctx=length,
            n_batch=task["prompt_len"],
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=-1,
            verbose=False,
            seed=0,
        )
        self.vocab_size = self._llm.n_vocab()

    def run(self, prompts: list[list[int]], num_new: int) -> None:
        for prompt in prompts:
            self._llm.reset()
            self._llm.eval(prompt)
            for _ in range(num_new - 1):
                self._llm.eval([self._llm.sample(temp=0.0)])


RUNTIMES: dict[str, Callable[[dict[str, Any]], Runtime]] = {
    "transformers": Transformers,
    "vllm": Vllm,
    "llama_cpp": LlamaCpp,
}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of every repetition after a warm-up: to the first token, and to all ``num_new``."""
    began = time.perf_counter()
    runtime = RUNTIMES[task["runtime"]](task)
    load_s = time.perf_counter() - began
    first_s: list[float] = []
    all_s: list[float] = []
    for repetition in range(task["repeats"] + 1):
        prompts = [
            _prompt(row, repetition, task["prompt_len"], runtime.vocab_size) for row in range(task["batch_size"])
        ]
        for seconds, num_new in ((first_s, 1), (all_s, task["num_new"])):
            began = time.perf_counter()
            runtime.run(prompts, num_new)
            seconds.append(time.perf_counter() - began)
    return {
        "version": sys.modules[runtime.module].__version__,
        "load_s": load_s,
        "first_s": first_s[1:],
        "all_s": all_s[1:],
        "peak_memory_bytes": _peak_memory_bytes(),
        "peak_device_bytes": _peak_device_bytes(),
    }


def _prompt(row: int, repetition: int, length: int, vocab_size: int) -> list[int]:
    """Return token ids that differ between any two prompts, so that no cached result can be reused."""
    return [(7919 * (place + 131 * row + 17 * repetition) + 11) % vocab_size for place in range(length)]


def _peak_memory_bytes() -> int:
    """Return the peak memory of this process; ``getrusage`` alone would include its parent's."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text("ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _peak_device_bytes() -> int | None:
    """Return the peak memory on the accelerator, if there is one that torch uses."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.max_memory_allocated())
