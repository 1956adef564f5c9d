"""Runs in llama.cpp's own environment: tell where its library and headers are installed."""

import json
from pathlib import Path

import llama_cpp

print("RESULT " + json.dumps({"folder": str(Path(llama_cpp.__file__).parents[1])}))
