"""Runs in an environment with Pillow: load a vision-language model, and ask it about images of two colours.

usage: check_vision.py transformers|vllm MODEL_DIR -> one line ``RESULT {json}``

``answers`` are what it writes about each image, ``logprobs`` those of the tokens of one answer under some images. Both
programs round alike: they run in bfloat16, and Transformers in the class that config.json declares.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import vision  # before Transformers and vLLM, which look for torchvision

# isort: split
import check_vllm  # noqa: F401  (it sets what vLLM reads from the environment)
import torch
import transformers

PAIRS = list(product(vision.COLOURS, repeat=2))
SCORED = [pair for pair in PAIRS if pair[0] != pair[1]][::2]
SCORED_ANSWER = vision.answer("white", "green")
NUM_NEW = 16


def declared_class(model_dir: str) -> str:
    """Return the name of the class that config.json declares."""
    name: str = json.loads((Path(model_dir) / "config.json").read_text())["architectures"][0]
    return name


def of_transformers(model_dir: str, processor: Any) -> dict[str, Any]:
    model = getattr(transformers, declared_class(model_dir)).from_pretrained(model_dir, dtype=torch.bfloat16).eval()

    def read(pair: tuple[str, str], text: str) -> Any:
        inputs = processor(images=[[vision.image(*pair)]], text=[text], return_tensors="pt")
        return inputs.to(dtype=torch.bfloat16)

    prompt, answers, logprobs = vision.prompt(processor), {}, {}
    with torch.inference_mode():
        # First: compressed-tensors unpacks all layers in the model's own forward pass; generate runs the tower before.
        for pair in SCORED:
            inputs = read(pair, prompt + SCORED_ANSWER)
            scores = model(**inputs).logits[0].float().log_softmax(-1)
            wanted = inputs["input_ids"][0, 1:]
            logprobs[vision.answer(*pair)] = scores[:-1].gather(1, wanted[:, None])[-len(SCORED_ANSWER) :, 0].tolist()
        for pair in PAIRS:
            inputs = read(pair, prompt)
            ids = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            answers[vision.answer(*pair)] = processor.tokenizer.decode(ids, skip_special_tokens=True)
    return {"answers": answers, "logprobs": logprobs}


def of_vllm(model_dir: str, processor: Any) -> dict[str, Any]:
    from vllm import LLM, ModelRegistry, SamplingParams

    # vLLM looks at a model's class in a process of its own, which would have no torchvision, unless it is at hand.
    declared = declared_class(model_dir)
    ModelRegistry.register_model(declared, ModelRegistry.models[declared].load_model_cls())
    llm = LLM(
        model_dir, dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=2, seed=0,
        enable_prefix_caching=False, max_num_batched_tokens=512, limit_mm_per_prompt={"image": 1},
    )  # fmt: skip
    prompt = vision.prompt(processor)

    def run(pairs: list[tuple[str, str]], text: str, **sampling: Any) -> dict[str, Any]:
        requests = [{"prompt": text, "multi_modal_data": {"image": vision.image(*pair)}} for pair in pairs]
        outputs = llm.generate(requests, SamplingParams(temperature=0, **sampling), use_tqdm=False)
        return {vision.answer(*pair): output for pair, output in zip(pairs, outputs, strict=True)}

    written = run(PAIRS, prompt, max_tokens=NUM_NEW)
    logprobs = {}
    for name, output in run(SCORED, prompt + SCORED_ANSWER, max_tokens=1, prompt_logprobs=0).items():
        scored = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[-len(SCORED_ANSWER) :]
        logprobs[name] = [candidates[token].logprob for token, candidates in scored]
    answers = {name: output.outputs[0].text for name, output in written.items()}
    return {"answers": answers, "logprobs": logprobs}


def main() -> None:
    program, model_dir = sys.argv[1:3]
    processor = transformers.AutoProcessor.from_pretrained(model_dir)
    result = {"transformers": of_transformers, "vllm": of_vllm}[program](model_dir, processor)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
