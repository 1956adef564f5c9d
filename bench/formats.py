"""``make bench-formats``: quantize and dequantize one large weight, against a plain copy, AMD Quark and torchao.

One process runs all of them in turn, in the environment of the peers (``make consumers``), and takes the best of some
rounds: what other programs on the machine do hurts all alike. int4 and fp8 are given their scales; for MXFP4 every
program finds them itself, as that is part of its cast. GB/s count the bytes of the weight read and written once; the
copy allocates its result as the others do.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("QUARK_DISABLE_COMPILE", "1")

import torch

from quantcore.config.grouping import weight_grouping
from quantcore.config.presets import PRESETS
from quantcore.tensors.affine import fake_quantize, fake_quantize_activation, find_params, min_max

Cast = Callable[[], torch.Tensor]
SCHEMES = {"int4": "int4_wo_128", "fp8": "fp8", "mxfp4": "mxfp4"}


def ours(x: torch.Tensor) -> dict[str, Cast]:
    casts: dict[str, Cast] = {}
    for scheme in ("int4", "fp8"):
        spec = PRESETS[SCHEMES[scheme]].layer_config.weight
        assert spec is not None
        grouping = weight_grouping(spec)
        params = find_params(*min_max(grouping.split(x)), spec, torch.float32)
        casts[scheme] = lambda spec=spec, grouping=grouping, params=params: fake_quantize(x, spec, grouping, params)
    mx = PRESETS["mxfp4"].layer_config.input_tensors
    assert mx is not None
    casts["mxfp4"] = lambda: fake_quantize_activation(x, mx, None)
    return casts


def quark(x: torch.Tensor) -> dict[str, Cast]:
    from quark.torch.kernel.hw_emulation import hw_emulation_interface as kernel

    int4 = x.reshape(-1, 128).abs().amax(-1).reshape(x.shape[0], -1) / 7
    fp8 = x.abs().amax() / 448
    zero = torch.zeros_like(int4)
    return {
        "int4": lambda: kernel.fake_quantize_int_per_group_affine(
            inputs=x, scale=int4, zero_point=zero, axis=-1, group_size=128, quant_min=-8, quant_max=7, round_mode=8
        ),
        "fp8": lambda: kernel.fake_quantize_fp8_per_tensor_with_scale(x, fp8, torch.float8_e4m3fn, 448.0),
        "mxfp4": lambda: kernel.fake_quantize_mx(x, -1, 32, mx_element_dtype="fp4"),
    }


def torchao(x: torch.Tensor) -> dict[str, Cast]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization import quant_primitives as affine

    group, whole = (1, 128), tuple(x.shape)
    int4 = x.reshape(-1, 128).abs().amax(-1).reshape(x.shape[0], -1) / 7
    zero = torch.zeros_like(int4, dtype=torch.int32)
    fp8 = (x.abs().amax() / 448).reshape(1, 1)
    limits = (torch.int8, -8, 7)

    def int4_cast() -> torch.Tensor:
        codes = affine.quantize_affine(x, group, int4, zero, *limits)
        return affine.dequantize_affine(codes, group, int4, zero, *limits, output_dtype=x.dtype)

    def fp8_cast() -> torch.Tensor:
        return affine._dequantize_affine_float8(affine._quantize_affine_float8(x, fp8, torch.float8_e4m3fn), fp8)

    def mxfp4_cast() -> torch.Tensor:
        return MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32).dequantize(x.dtype)

    assert whole == tuple(int4_cast().shape)
    return {"int4": int4_cast, "fp8": fp8_cast, "mxfp4": mxfp4_cast}


def best(casts: dict[str, Cast], rounds: int) -> dict[str, float]:
    """Return the seconds of the fastest of ``rounds``; programs take turns, so that a busy machine slows all alike."""
    seconds = dict.fromkeys(casts, float("inf"))
    for _ in range(rounds):
        for name, cast in casts.items():
            started = time.perf_counter()
            cast()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-formats", description=__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 14336), help="of the weight")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x = torch.randn(options.shape).to(getattr(torch, options.dtype))
    programs = {"quantcore": ours(x), "amd-quark": quark(x), "torchao": torchao(x)}
    size = "x".join(map(str, options.shape))
    print(
        f"{size} {options.dtype}, {options.threads} thread(s), best of {options.rounds}; x copy: times a plain copy's"
    )
    print(f"{'scheme':8}{'program':12}{'ms':>9}{'GB/s':>8}{'x copy':>8}")
    for scheme in SCHEMES:
        casts = {"copy": x.clone, **{name: casts[scheme] for name, casts in programs.items()}}
        seconds = best(casts, options.rounds)
        for name, taken in seconds.items():
            speed = 2 * x.nbytes / taken / 1e9
            print(f"{scheme:8}{name:12}{taken * 1e3:9.1f}{speed:8.2f}{taken / seconds['copy']:8.2f}")
        peers = min(seconds["amd-quark"], seconds["torchao"])
        print(f"{scheme:8}quantcore is {peers / seconds['quantcore']:.2f} times as fast as the faster peer")


if __name__ == "__main__":
    main()
