"""Products of narrow floats, computed wide: the same results, rounded once."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from quantcore.engine.runtime import matmul as products
from quantcore.engine.runtime.matmul import (
    WideMatmul,
    add_product,
    adds_narrow_products,
    matmul_precision,
    tensor_cores,
)
from tests.support import accelerator
from tests.support.accelerator import on_accelerator

NARROW = (torch.bfloat16, torch.float16)


class Watched(TorchDispatchMode):
    """Notes the dtype of each matrix product that is computed."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default):
            self.dtypes.add(args[1].dtype)
        return func(*args, **(kwargs or {}))


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("product", "shapes"),
    [
        (functional.linear, [(2, 5, 64), (32, 64), (32,)]),
        (torch.addmm, [(32,), (5, 64), (64, 32)]),
        (torch.matmul, [(2, 5, 64), (64, 32)]),
        (torch.Tensor.__matmul__, [(2, 5, 64), (64, 32)]),
        (torch.bmm, [(2, 5, 64), (2, 64, 32)]),
        (functional.scaled_dot_product_attention, [(1, 2, 5, 64)] * 3),
    ],
)
def test_a_product_is_that_of_float32_rounded(product, shapes, dtype):
    given = [random(*shape, dtype=dtype) for shape in shapes]
    expected = product(*(x.float() for x in given)).to(dtype)
    plain = product(*given)
    with WideMatmul():
        found = product(*given)
    assert found.dtype == dtype and torch.equal(found, expected)
    torch.testing.assert_close(found, plain, rtol=4 * torch.finfo(dtype).eps, atol=4e-2)


@pytest.mark.parametrize("piece", [1, 200, 64 * 31])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_large_weight_is_widened_in_pieces(monkeypatch, piece, has_bias):
    layer, x = nn.Linear(64, 32, bias=has_bias, dtype=torch.bfloat16), random(2, 5, 64)
    wide = layer.double()(x.double())
    layer = layer.bfloat16()
    monkeypatch.setattr(products, "MAX_WIDE_VALUES", piece)
    largest = []
    widened = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: largest.append(x.numel()) or widened(x))
    with WideMatmul():
        found = layer(x)
    torch.testing.assert_close(found.double(), wide, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)
    assert max(largest) <= max(piece, x.numel()) < layer.weight.numel()


@pytest.mark.parametrize(("num_rows", "piece"), [(8, 200), (8, 1 << 22), (9, 200), (9, 1 << 22)])
def test_products_of_few_rows_stay_narrow_where_a_model_is_evaluated(monkeypatch, num_rows, piece):
    monkeypatch.setattr(products, "MAX_WIDE_VALUES", piece)
    x, weight = random(1, num_rows, 64), random(32, 64)
    for mode, dtype in (
        (torch.inference_mode, torch.bfloat16 if num_rows <= 8 else torch.float32),
        (torch.no_grad, torch.float32),
    ):
        with mode(), WideMatmul(), Watched() as watched:
            functional.linear(x, weight)
        assert watched.dtypes == {dtype}


@pytest.mark.parametrize("dtype", NARROW)
def test_a_mode_is_entered_for_dtypes_that_are_computed_and_widened(monkeypatch, dtype):
    monkeypatch.setattr(products, "_faster_when_wide", lambda: frozenset({torch.float16}))
    found = matmul_precision(torch.device("cpu"), {dtype, torch.float32})
    assert isinstance(found, WideMatmul) == (dtype == torch.float16)


def test_named_operands_are_widened_too():
    q, k, v = (random(1, 2, size, 64) for size in (3, 5, 5))
    mask = torch.ones(3, 5, dtype=torch.bool).tril()
    with WideMatmul():
        found = functional.scaled_dot_product_attention(q, key=k, value=v, attn_mask=mask)
    expected = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_products_stay_as_they_are(dtype):
    x, layer = random(5, 64, dtype=dtype), nn.Linear(64, 8, dtype=dtype)
    expected = layer(x)
    with WideMatmul():
        assert torch.equal(layer(x), expected)


def test_gradients_pass():
    layer, x = nn.Linear(64, 8, dtype=torch.bfloat16), random(5, 64)
    with WideMatmul():
        layer(x).float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16 and layer.weight.grad.any() and layer.bias.grad.any()


@pytest.mark.parametrize(
    ("machine", "capability", "instructions", "widened"),
    [
        ("x86_64", "AVX2", (), {torch.bfloat16, torch.float16}),
        ("x86_64", "DEFAULT", ("avx512_bf16",), {torch.bfloat16, torch.float16}),
        ("x86_64", "AVX512", ("avx512_bf16",), {torch.float16}),
        ("AMD64", "AVX512", ("amx_tile",), {torch.float16}),
        ("x86_64", "AVX512", ("amx_tile", "amx_fp16"), set()),
        ("aarch64", "DEFAULT", (), set()),
    ],
)
def test_where_products_are_widened(monkeypatch, machine, capability, instructions, widened):
    monkeypatch.setattr(products.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for name in ("avx512_bf16", "amx_tile", "amx_fp16"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name in instructions)
    products._faster_when_wide.cache_clear()
    try:
        found = set()
        for dtype in NARROW:
            with matmul_precision(torch.device("cpu")), Watched() as watched:
                functional.linear(random(3, 64, dtype=dtype), random(8, 64, dtype=dtype))
            found |= {dtype} if watched.dtypes == {torch.float32} else set()
        assert found == widened
        assert not isinstance(matmul_precision(torch.device("cuda")), WideMatmul)
    finally:
        products._faster_when_wide.cache_clear()


@pytest.mark.parametrize(
    ("device", "dtype", "within"),
    [("cuda", torch.bfloat16, "tf32"), ("cuda", torch.float32, "ieee"), ("cpu", torch.bfloat16, "ieee")],
)
@pytest.mark.parametrize("before", ["ieee", "tf32"])
def test_sums_of_narrow_values_use_tensor_cores(device, dtype, within, before):
    """No GPU computes here: what is seen is what torch was told, and that it is as before afterwards."""
    told = torch.backends.cuda.matmul
    at_first = told.fp32_precision
    told.fp32_precision = before
    try:
        with tensor_cores(torch.device(device), dtype):
            assert told.fp32_precision == ("tf32" if before == "tf32" else within)
        assert told.fp32_precision == before
    finally:
        told.fp32_precision = at_first


def rounded(self, left, right, out_dtype, *, out):
    """As it would be if the sums were bfloat16."""
    return out.copy_(self + (left @ right).to(out_dtype))


def absent(*_, **__):
    raise NotImplementedError


@pytest.mark.parametrize(("product", "is_exact"), [(None, True), (rounded, False), (absent, False)])
def test_a_device_is_asked_for_exact_sums_of_narrow_products(monkeypatch, product, is_exact):
    if product is not None:
        monkeypatch.setitem(accelerator.ON_CUDA_ONLY, torch.ops.aten.addmm.dtype_out, product)
    assert on_accelerator(lambda _: adds_narrow_products(torch.device("sim", 0))) == is_exact
    assert not adds_narrow_products(torch.device("cpu"))


def test_narrow_products_are_added_in_place():
    def work(_):
        there, sums = x_TI.to("sim"), torch.ones(8, 8, device="sim")
        add_product(sums[2:5, :7], there[:, 2:5].T, there[:, :7])
        return sums.cpu()

    x_TI = random(50, 8, dtype=torch.bfloat16)
    expected = torch.ones(8, 8, dtype=torch.float64)
    expected[2:5, :7] += x_TI.double()[:, 2:5].T @ x_TI.double()[:, :7]
    assert torch.allclose(on_accelerator(work).double(), expected, rtol=1e-5)
