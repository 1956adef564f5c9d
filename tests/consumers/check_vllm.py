"""Runs in vLLM's own environment: load a checkpoint, generate, and measure the perplexity of given token windows.

usage: check_vllm.py MODEL_DIR WINDOWS.json [KV_CACHE_DTYPE] -> one line ``RESULT {json}``

WINDOWS.json is a list of token id lists. With a KV cache dtype the result holds the scales that vLLM read.
"""

import json
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")  # on processors with AMX it would round the inputs to int8 as well
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process: its errors reach us
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    import torch
    from vllm import LLM, SamplingParams

    # vLLM 0.32 computes with AMX tiles without asking the system for them: it then stops with "Illegal instruction",
    # unless a layer was large enough for oneDNN to ask.
    torch.cpu._init_amx()
    model_dir, windows = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    kv_cache_dtype = sys.argv[3] if len(sys.argv) > 3 else "auto"
    longest = max(map(len, windows))
    llm = LLM(
        model_dir, dtype="bfloat16", enforce_eager=True, max_model_len=longest + 32, max_num_seqs=2, seed=0,
        enable_prefix_caching=False, max_num_batched_tokens=longest + 32, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=8)
    texts = [out.outputs[0].text for out in llm.generate(["The capital of France is"], greedy, use_tqdm=False)]
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    loss = count = 0.0
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], scoring, use_tqdm=False)
    for window, output in zip(windows, outputs, strict=True):
        for token, logprobs in list(zip(window, output.prompt_logprobs, strict=True))[1:]:
            loss -= logprobs[token].logprob
            count += 1
    method = llm.llm_engine.vllm_config.model_config.quantization
    result = {"texts": texts, "perplexity": math.exp(loss / count), "method": str(method)}
    if kv_cache_dtype != "auto":
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        model = worker.model_runner.model.model
        attentions = [layer.self_attn.attn for layer in getattr(model, "decoder", model).layers]
        result["kv_scales"] = [[float(attention._k_scale), float(attention._v_scale)] for attention in attentions]
        scales = [[float(attention._q_scale), float(attention._prob_scale)] for attention in attentions]
        result["attention_scales"] = scales
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
