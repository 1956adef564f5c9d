"""``make bench-engines``: our engine beside AMD Quark, llm-compressor and GPTQModel, on the same model and tokens."""
