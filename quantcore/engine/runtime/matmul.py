"""Matrix products of narrow floats, computed in the fastest way of each kind of processor."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from quantcore.plan.workload import TILE_BYTES

PRODUCTS = frozenset(
    {
        functional.linear,
        functional.scaled_dot_product_attention,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.matmul,
        torch.mm,
        torch.Tensor.__matmul__,
        torch.Tensor.bmm,
        torch.Tensor.matmul,
        torch.Tensor.mm,
    }
)
NARROW = frozenset({torch.bfloat16, torch.float16})
MAX_WIDE_VALUES = TILE_BYTES // 4
"""Number of a weight's values that are widened at a time."""
FEW_ROWS = 8
"""To widen a weight for no more rows than these takes longer than their narrow product: a token takes 3 to 17 times as
long with AVX2. In inference mode, which evaluation uses, the product stays narrow. Calibration sums up any number of
rows alike."""


def matmul_precision(device: torch.device, dtypes: Iterable[torch.dtype] = NARROW) -> AbstractContextManager[object]:
    """Return a context in which products of ``dtypes`` on ``device`` are computed in the way that is faster there.

    x86 processors multiply float32 at least 1.7 times as fast as a narrow dtype that they have no instructions for. So
    its operands are widened for the product, and the result is rounded once, as in a narrow product.
    """
    widened = _faster_when_wide().intersection(dtypes) if device.type == "cpu" else frozenset()
    return WideMatmul(widened) if widened else nullcontext()


@contextmanager
def tensor_cores(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Let float32 products of values that came as ``dtype`` round operands to TF32 on GPUs, inside the block.

    TF32 holds bfloat16 and float16 exactly, and sums stay float32.
    """
    precision = torch.backends.cuda.matmul.fp32_precision
    if device.type == "cuda" and dtype in NARROW:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision


def add_product(sum_MN: torch.Tensor, left_MT: torch.Tensor, right_TN: torch.Tensor) -> None:
    """Add ``left @ right`` to the float32 or float64 ``sum`` in place.

    Operands have its dtype, or a narrow one where ``adds_narrow_products``.
    """
    if left_MT.dtype == sum_MN.dtype:
        sum_MN.addmm_(left_MT, right_TN)
    else:
        torch.addmm(sum_MN, left_MT, right_TN, out_dtype=sum_MN.dtype, out=sum_MN)


@cache
def adds_narrow_products(device: torch.device) -> bool:
    """Return whether ``device`` adds products of bfloat16 to a float32 matrix; tried once, on a small one.

    They are exact in float32, and GPUs compute them twice as fast as those of TF32. Torch has them for CUDA alone.
    """
    if device.type == "cpu":
        return False
    x_TI = torch.full((2, 2), 1 + 2**-7, dtype=torch.bfloat16, device=device)
    sums = torch.ones(4, 4, device=device)
    try:
        add_product(sums[1:3, :2], x_TI.T, x_TI)
    except (RuntimeError, TypeError):  # torch's NotImplementedError is a RuntimeError
        return False
    expected = torch.ones(4, 4)
    expected[1:3, :2] += 2 * (1 + 2**-7) ** 2  # more digits than bfloat16 has
    return torch.equal(sums.cpu(), expected)


class WideMatmul(TorchFunctionMode):
    """Computes products of the dtypes ``widened`` in float32, and rounds them to the dtype of their operands."""

    def __init__(self, widened: frozenset[torch.dtype] = NARROW) -> None:
        super().__init__()
        self._widened = widened

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        narrow = args[0].dtype if func in PRODUCTS and args else None
        if narrow not in self._widened:
            return func(*args, **named)
        if func is functional.linear and len(args) > 1:
            if args[0].numel() <= FEW_ROWS * args[1].shape[-1] and torch.is_inference_mode_enabled():
                return func(*args, **named)
            if args[1].numel() > MAX_WIDE_VALUES:
                return _linear_in_tiles(*args, **named)
        args, named = tree_map(_widened, (args, named))
        return func(*args, **named).to(narrow)


def _linear_in_tiles(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``linear`` for some outputs at a time, so that a wide layer is not held in float32 as a whole."""
    num_rows = max(1, MAX_WIDE_VALUES // weight_OI.shape[1])
    wide = x.float()
    parts = [
        functional.linear(
            wide,
            weight_OI[start : start + num_rows].float(),
            None if bias_O is None else bias_O[start : start + num_rows].float(),
        ).to(x.dtype)
        for start in range(0, len(weight_OI), num_rows)
    ]
    return torch.cat(parts, dim=-1)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in NARROW else leaf


@cache
def _faster_when_wide() -> frozenset[torch.dtype]:
    """Return the dtypes that this processor has no instructions for (AMX, AVX-512 BF16), or torch may not use them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    if torch.backends.cpu.get_cpu_capability() != "AVX512":  # it can be limited: ATEN_CPU_CAPABILITY
        return NARROW
    native = {
        torch.bfloat16: torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported(),
        torch.float16: torch.cpu._is_amx_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_native in native.items() if not is_native)
