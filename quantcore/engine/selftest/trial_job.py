"""A small job from files to files with GPTQ and its proof, on a model and a text that need no network."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantcore.checkpoint.headers import read_tensor_headers
from quantcore.config import presets
from quantcore.config.algorithms import GPTQConfig
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.evaluation.baseline_cache import VARIABLE
from quantcore.engine.pipeline.job import run
from quantcore.engine.runtime.devices import DEVICE, default_device
from quantcore.engine.selftest.parts import SOLVED, Computed
from quantcore.engine.selftest.values import Allowed
from quantcore.events import silence
from quantcore.formats import FORMATS
from quantcore.tensors.packing import unpack
from quantcore.tensors.source import Source

SEQ_LEN = 128
ALLOWED = Allowed(
    share=0.1,
    largest=2e-2,
    why="The inputs of a layer are sums in any order, rounded to bfloat16, and each error of GPTQ moves the "
    "following weights. The compared values are the errors of the layers' outputs, which must not increase.",
)


def quantized(device: torch.device) -> Computed:
    """Run the job on ``device``: the codes in its files, and the relative errors of the layers' outputs.

    Raises QuantError if it fails; its proof, in a process of its own, is a part of it.
    """
    with TemporaryDirectory(prefix="bitfoundry-selftest-") as scratch:
        model, out = Path(scratch) / "model", Path(scratch) / "out"
        write_model(model)
        task = Task(
            model_dir=model,
            output_dir=out,
            config=replace(presets.PRESETS[SOLVED].config, algo_config=(GPTQConfig(),)),
            calibration=CalibrationConfig(num_samples=16, seq_len=SEQ_LEN),
            evaluation=EvaluationConfig(num_windows=2, seq_len=SEQ_LEN, num_prompts=0),
            export=("quark",),
        )
        on_device = {} if device == default_device() else {DEVICE: str(device)}
        with _environment({VARIABLE: "", **on_device}):  # both runs measure the original
            report = run(task, silence)
        assert report is not None
        source = Source(out, read_tensor_headers(out))
        names = sorted(name for name, header in source.tensors.items() if header.dtype == "I32")
        codes = [unpack(source.read(name), FORMATS["uint4"]).flatten() for name in names]
        errors = {layer.name: layer.output_error or 0.0 for layer in report.layers}
        return Computed(torch.cat(codes), torch.tensor([errors[name] for name in sorted(errors)]))


def write_model(folder: Path) -> None:
    """Write a Llama of two blocks with random weights, and a tokenizer whose tokens are bytes."""
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * SEQ_LEN,
        bos_token_id=256,
        eos_token_id=256,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    config.save_pretrained(folder)
    save_file(model.bfloat16().state_dict(), folder / "model.safetensors", {"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: code for code, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")  # type: ignore[no-untyped-call]
    made.save_pretrained(folder)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while this lasts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
