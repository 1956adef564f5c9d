"""Runs in ONNX Runtime GenAI's environment: compute logits, tokens of texts and answers with its own defaults.

usage: check_genai.py WINDOWS.json MODEL_DIR ... -> one line ``RESULT {MODEL_DIR: {"perplexity", "greedy"}}``, or the
           error in place of these. WINDOWS.json is a list of token id lists; ``greedy`` are the tokens that follow the
           first 8 of the first window
       check_genai.py --logits WINDOWS.json MODEL_DIR OUT.npy -> the logits of the first window, float32
       check_genai.py --texts TEXTS.json MODEL_DIR -> the tokens of each text, and of a chat with the first one if the
           model has a template for chats
"""

import json
import math
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy
import onnxruntime_genai as genai

NUM_NEW = 16


def main() -> None:
    commands = {"--logits": save_logits, "--texts": tokens_of_texts}
    if sys.argv[1] in commands:
        result = commands[sys.argv[1]](*sys.argv[2:])
    else:
        windows = json.loads(Path(sys.argv[1]).read_text())
        result = {folder: measured_or_error(folder, windows) for folder in sys.argv[2:]}
    print("RESULT " + json.dumps(result))


def measured_or_error(folder, windows):
    try:
        return measured(folder, windows)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def measured(folder, windows):
    model = genai.Model(folder)
    losses = [loss for window in windows for loss in losses_of(model, window)]
    generator = started(model, windows[0][:8], NUM_NEW)
    while not generator.is_done():
        generator.generate_next_token()
    greedy = [int(token) for token in generator.get_sequence(0)[8:]]
    return {"perplexity": math.exp(numpy.mean(losses)), "greedy": greedy}


def started(model, ids, num_new, **search):
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + num_new, **search)
    generator = genai.Generator(model, params)
    generator.append_tokens(numpy.array(ids, dtype=numpy.int32))
    return generator


def logits_of(model, ids):
    return started(model, ids, 1).get_output("logits")[0].astype(numpy.float64)


def losses_of(model, window):
    logits = logits_of(model, window[:-1])
    logits -= logits.max(axis=-1, keepdims=True)
    return numpy.log(numpy.exp(logits).sum(axis=-1)) - logits[numpy.arange(len(window) - 1), window[1:]]


def save_logits(windows_file, folder, out):
    window = json.loads(Path(windows_file).read_text())[0]
    logits = logits_of(genai.Model(folder), window[:-1]).astype(numpy.float32)
    numpy.save(out, logits)
    return logits.shape


def tokens_of_texts(texts_file, folder):
    model = genai.Model(folder)
    tokenizer = genai.Tokenizer(model)
    texts = json.loads(Path(texts_file).read_text())

    def encode(text):
        return list(map(int, tokenizer.encode(text)))

    encoded = {"without_special_tokens": list(map(encode, texts))}
    tokenizer.update_options(add_special_tokens="true")
    encoded["texts"] = list(map(encode, texts))
    tokenizer.update_options(add_special_tokens="false")
    if not (Path(folder) / "chat_template.jinja").is_file():
        return encoded
    messages = json.dumps([{"role": "user", "content": texts[0]}])
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return {**encoded, "chat": chat, "chat_tokens": encode(chat)}


if __name__ == "__main__":
    main()
