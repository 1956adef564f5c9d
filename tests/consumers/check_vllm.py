"""Runs in vLLM's own environment: load a checkpoint, generate, and measure the perplexity of given token windows.

usage: check_vllm.py MODEL_DIR WINDOWS.json [KV_CACHE_DTYPE] -> one line ``RESULT {json}``
       check_vllm.py --each WINDOWS.json MODEL_DIR ... -> one such line, {MODEL_DIR: perplexity, or why it failed}
       check_vllm.py --embed TEXTS.json MODEL_DIR ... -> one such line, {MODEL_DIR: embeddings, or why it failed}

WINDOWS.json is a list of token id lists. With a KV cache dtype the result holds the scales that vLLM read.
"""

import json
import math
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")  # on processors with AMX it would round the inputs to int8 as well
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process: its errors reach us
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def main() -> None:
    # vLLM 0.32 computes with AMX tiles without asking the system for them: it then stops with "Illegal instruction",
    # unless a layer was large enough for oneDNN to ask.
    torch.cpu._init_amx()
    if sys.argv[1] in ("--each", "--embed"):
        given, of_model = (
            json.loads(Path(sys.argv[2]).read_text()),
            {"--each": perplexity, "--embed": embed}[sys.argv[1]],
        )
        result = {model_dir: found_or_error(of_model, model_dir, given) for model_dir in sys.argv[3:]}
    else:
        result = measure(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), *sys.argv[3:])
    print("RESULT " + json.dumps(result))


def found_or_error(of_model, model_dir, given):
    try:
        return of_model(model_dir, given)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        cleanup_dist_env_and_memory()


def perplexity(model_dir, windows):
    return measure(model_dir, windows)["perplexity"]


def embed(model_dir, texts):
    llm = LLM(model_dir, dtype="bfloat16", enforce_eager=True, max_model_len=256, seed=0)
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def measure(model_dir, windows, kv_cache_dtype="auto"):
    longest = max(map(len, windows))
    llm = LLM(
        model_dir, dtype="bfloat16", enforce_eager=True, max_model_len=longest + 32, max_num_seqs=2, seed=0,
        enable_prefix_caching=False, max_num_batched_tokens=longest + 32, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=8)
    [answer] = llm.generate(["The capital of France is"], greedy, use_tqdm=False)
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    loss = count = 0.0
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], scoring, use_tqdm=False)
    for window, output in zip(windows, outputs, strict=True):
        for token, logprobs in list(zip(window, output.prompt_logprobs, strict=True))[1:]:
            loss -= logprobs[token].logprob
            count += 1
    method = llm.llm_engine.vllm_config.model_config.quantization
    result = {
        "texts": [answer.outputs[0].text], "prompt_ids": answer.prompt_token_ids, "perplexity": math.exp(loss / count),
        "method": str(method),
    }  # fmt: skip
    if kv_cache_dtype != "auto":
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        model = worker.model_runner.model.model
        attentions = [layer.self_attn.attn for layer in getattr(model, "decoder", model).layers]
        result["kv_scales"] = [[float(attention._k_scale), float(attention._v_scale)] for attention in attentions]
        scales = [[float(attention._q_scale), float(attention._prob_scale)] for attention in attentions]
        result["attention_scales"] = scales
    return result


if __name__ == "__main__":
    main()
