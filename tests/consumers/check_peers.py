"""Runs in the peers' environment: results of AMD Quark, torchao, compressed-tensors, bitsandbytes, gguf, ml_dtypes.

usage: check_peers.py IN.safetensors OUT.safetensors

IN holds weights [out, in] as ``x/NAME``, integer codes as ``codes/DTYPE`` and values of fp4 and fp6 as
``levels/DTYPE``. OUT holds ``CASE/NAME/PART`` for the cases of peers_cases.py, and ``FUNCTION/NAME/PART`` for the rest.
"""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peers_others
import peers_quark
import peers_torchao
import torch
from peers_cases import CASES
from safetensors.torch import load_file, save_file

PEERS = {
    "quark": peers_quark.quantize,
    "torchao": peers_torchao.quantize,
    "compressed_tensors": peers_others.compressed_tensors,
    "gguf": peers_others.gguf_mxfp4,
}


def main() -> None:
    tensors = load_file(sys.argv[1])
    weights = {name.removeprefix("x/"): x for name, x in tensors.items() if name.startswith("x/")}
    codes = {name.removeprefix("codes/"): x for name, x in tensors.items() if name.startswith("codes/")}
    levels = {name.removeprefix("levels/"): x for name, x in tensors.items() if name.startswith("levels/")}
    out: dict[str, torch.Tensor] = {}

    def keep(prefix: str, outputs: dict[str, torch.Tensor]) -> None:
        out.update({f"{prefix}/{part}": value.detach().contiguous().clone() for part, value in outputs.items()})

    for case in CASES:
        for name, x_OI in weights.items():
            keep(f"{case.name}/{name}", PEERS[case.peer](case, x_OI.clone()))
    for name, x_OI in weights.items():
        keep(f"gguf/{name}", peers_others.gguf_blocks(x_OI))
        for dtype in ("nf4", "fp4"):
            keep(f"bitsandbytes-{dtype}/{name}", peers_others.bitsandbytes_4bit(x_OI, dtype))
        keep(f"bitsandbytes-nested/{name}", peers_others.bitsandbytes_nested(x_OI.abs()))
        keep(f"torchao-encode/{name}", peers_torchao.encode(x_OI))
        keep(f"ml_dtypes-encode/{name}", peers_others.ml_dtypes_encode(x_OI))
    for dtype, values in peers_others.ml_dtypes_decode().items():
        keep(f"ml_dtypes-decode/{dtype}", {"values": values})
    keep("pack/quark", peers_quark.pack(codes, levels))
    keep("pack/torchao", peers_torchao.pack(codes, levels))
    keep("pack/compressed_tensors", peers_others.compressed_tensors_pack(codes, levels))
    save_file(out, sys.argv[2])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
