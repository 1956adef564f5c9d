"""Runs in llama.cpp's own environment: quantize a GGUF file with its own tool.

usage: quantize_llamacpp.py MODEL.gguf MIX OUT.gguf, with MIX as Q4_K_M
"""

import sys

import llama_cpp


def main() -> None:
    source, mix, target = sys.argv[1:]
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mix}")
    settings.nthread = 1
    settings.allow_requantize = True  # only the types are of interest
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings)
    if status:
        raise SystemExit(f"llama.cpp failed with status {status}")


if __name__ == "__main__":
    main()
