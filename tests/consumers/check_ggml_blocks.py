"""Runs in llama.cpp's own environment: what ggml itself reads in rows of blocks, and the blocks that it makes of rows.

usage: check_ggml_blocks.py IN.npz OUT.npz

IN.npz holds ``TYPE.data``, bytes of rows of blocks, and may hold ``TYPE.rows``, floats to quantize. OUT.npz holds
``TYPE.floats`` and ``TYPE.blocks``. TYPE is a type's name, as MXFP4.
"""

import ctypes
import sys
from pathlib import Path

import llama_cpp
import numpy as np

NUMBERS = {"IQ1_S": 19, "IQ1_M": 29, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41, "Q2_0": 42}
LIBRARY = Path(llama_cpp.__file__).parents[1] / "lib" / "libggml-base.so"


def main() -> None:
    ggml = ctypes.CDLL(str(LIBRARY))
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    given, found = np.load(sys.argv[1]), {}
    for name, array in given.items():
        kind, _, part = name.rpartition(".")
        number, array = NUMBERS[kind], np.ascontiguousarray(array)
        size, width = ggml.ggml_type_size(number), ggml.ggml_blck_size(number)
        if part == "data":
            floats = np.empty((len(array), array.shape[1] // size * width), dtype=np.float32)
            read = getattr(ggml, f"dequantize_row_{kind.lower()}")
            read(pointer(array), pointer(floats), ctypes.c_int64(floats.size))
            found[f"{kind}.floats"] = floats
            continue
        blocks = np.empty((len(array), array.shape[1] // width * size), dtype=np.uint8)
        num_rows, num_columns = map(ctypes.c_int64, array.shape)
        ggml.ggml_quantize_chunk(
            number, pointer(array), pointer(blocks), ctypes.c_int64(0), num_rows, num_columns, None
        )
        found[f"{kind}.blocks"] = blocks
    np.savez(sys.argv[2], **found)
    print("RESULT true")


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


if __name__ == "__main__":
    main()
