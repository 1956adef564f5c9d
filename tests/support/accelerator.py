"""A simulated accelerator: runs device code where there is no device, and counts what a device would feel.

PyTorch lets a Python program be a backend (PrivateUse1). Tensors on the device ``sim`` are wrappers around CPU tensors;
every operation on them runs on what they wrap. So the arithmetic is the CPU's, and ``torch.accelerator`` finds ``sim``.
As on CUDA:

- An operation on a tensor here and one there raises; only a host tensor of no dimensions may take part in an
  elementwise operation, and indices from the host are copied. Nothing falls back to the host in silence.
- Memory has a limit. Each storage takes a multiple of 512 bytes, as from CUDA's caching allocator.

Counted, by operation and by line of our code: launches of kernels, copies between host and device with their bytes (of
which how many come from pinned memory), and waits of the host for the device (``item``, ``tolist``, ``nonzero``,
``equal``, boolean indices, printing, copies to the host, and all operations whose output's shape depends on the data).

Not simulated: streams that overlap, and the order of sums in a real device's kernels. Attention takes the plain path.

The backend stays registered for the life of a process, so ``on_accelerator`` runs a test's work in a fork.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
import torch._dynamo  # a dispatch mode loads it: once here, and not in every fork
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.device_counts import Counts, place

T = TypeVar("T")

NAME = "sim"
BLOCK_BYTES = 512
"""The unit in which memory is given out."""
UNLIMITED_BYTES = 1 << 40
PINNED = "_is_pinned"
"""The attribute of host tensors in pinned memory."""

aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
TAKES_HOST_SCALARS = {
    *INDEXING, aten.where.self, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor,
    aten._foreach_mul_.Tensor,
}  # fmt: skip
"""Operations, beside elementwise ones, that take a host tensor of no dimensions on CUDA."""
WAITS = {aten._linalg_eigh.default, aten._linalg_svd.default, aten.linalg_qr.default}
"""Operations of known output shape that wait on CUDA for a status. All others that wait have a tag."""
WAITING_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
NO_KERNEL = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten._local_scalar_dense.default, aten._unsafe_view.default,
}  # fmt: skip
"""Operations that launch nothing, beside views."""


def _add_narrow_product(
    self: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype, *, out: torch.Tensor
) -> torch.Tensor:
    """Products of a narrow dtype that are added to a float32 matrix, which torch has for CUDA alone."""
    return torch.addmm(self, left.to(out_dtype), right.to(out_dtype), out=out)


ON_CUDA_ONLY = {aten.addmm.dtype_out: _add_narrow_product}
"""Operations that torch does not have for the CPU, and what computes them there."""


@dataclass
class _Device:
    """The state of the device of this process."""

    counts: Counts = field(default_factory=Counts)
    memory_bytes: int = UNLIMITED_BYTES
    is_present: bool = False


_device = _Device()


class _Held:
    """The memory of one storage on the device, for as long as any tensor uses it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        counts, wanted = _device.counts, _device.counts.held_bytes + self.num_bytes
        if wanted > _device.memory_bytes:
            self.num_bytes = 0
            raise torch.OutOfMemoryError(
                f"The simulated device is out of memory: {wanted} bytes are wanted, it has {_device.memory_bytes}."
            )
        counts.held_bytes, counts.peak_bytes = wanted, max(wanted, counts.peak_bytes)

    def __del__(self) -> None:
        _device.counts.held_bytes -= self.num_bytes


_held: WeakValueDictionary[int, _Held] = WeakValueDictionary()


class SimTensor(torch.Tensor):
    """A tensor on the device; ``raw`` is the CPU tensor that it wraps."""

    raw: torch.Tensor
    held: _Held

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> SimTensor:
        made: SimTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            layout=raw.layout, device=torch.device(NAME, 0), requires_grad=raw.requires_grad,
        )  # fmt: skip
        storage = raw.untyped_storage()
        held = _held.get(storage._cdata)
        if held is None:
            held = _held[storage._cdata] = _Held(storage.nbytes())
        made.raw, made.held = raw, held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: SimTensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self.raw, self.held = value.raw, value.held

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        _count_wait()
        return f"sim:{self.raw}"


class _Mode(TorchDispatchMode):
    """Sees the operations without a tensor on the device, too: those that make one, or copy one there."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "full_tensor") for kind in types):  # a DTensor, which calls the operation on its shard
            return NotImplemented
        return _run(func, args, kwargs or {})


def wrapped(x: Any) -> Any:
    return SimTensor(x) if isinstance(x, torch.Tensor) and not isinstance(x, SimTensor) else x


def unwrapped(x: Any) -> Any:
    return x.raw if isinstance(x, SimTensor) else x


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to it, or to the parts of a list or tuple."""
    return type(value)(_mapped(function, part) for part in value) if type(value) in (list, tuple) else function(value)


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += _tensors_in(value)
    return found


def count_launch(name: str) -> None:
    _device.counts.launches[name] += 1
    _device.counts.launch_places[place()] += 1


def _count_wait() -> None:
    _device.counts.waits[place()] += 1


def _count_copy(source: torch.Tensor, *, to_device: bool) -> None:
    counts = _device.counts
    (counts.to_device if to_device else counts.to_host).add(source.nbytes, is_pinned=hasattr(source, PINNED))
    if not to_device:
        _count_wait()


@dataclass(frozen=True)
class _Operation:
    """What is known of an operation beside its arguments."""

    name: str
    launches: bool
    waits: bool
    is_view: bool
    is_mutable: bool
    takes_host_scalars: bool

    @classmethod
    @cache
    def of(cls, func: Any) -> _Operation:
        tags = set(func.tags)
        return cls(
            str(func),
            launches=func not in NO_KERNEL and not func.is_view,
            waits=func in WAITS or (bool(WAITING_TAGS & tags) and func not in INDEXING),
            is_view=func.is_view,
            is_mutable=func._schema.is_mutable,
            takes_host_scalars=torch.Tag.pointwise in tags or func in TAKES_HOST_SCALARS,
        )

    def count_launch(self) -> None:
        if self.launches:
            count_launch(self.name)

    def check_devices(self, tensors: list[torch.Tensor]) -> None:
        """Raise RuntimeError for a host tensor in an operation on the device, where CUDA would."""
        for tensor in tensors:
            on_host = not isinstance(tensor, SimTensor) and tensor.device.type != "meta"
            if on_host and not (tensor.ndim == 0 and self.takes_host_scalars):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu!"
                    f" ({self.name}: a host tensor of shape {list(tensor.shape)}, at {place()})"
                )


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if isinstance(target, SimTensor) != isinstance(source, SimTensor):
        _count_copy(source, to_device=isinstance(target, SimTensor))
    elif isinstance(target, SimTensor):
        _Operation.of(aten.copy_.default).count_launch()
    unwrapped(target).copy_(unwrapped(source))
    return target


def _with_indices_on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy indices from the host, as CUDA does, and count the wait for those that are boolean."""
    indices = [index for index in args[1] if index is not None]
    for index in indices:
        if not isinstance(index, SimTensor):
            _count_copy(index, to_device=True)
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        _count_wait()
    return (args[0], _mapped(wrapped, args[1]), *args[2:])


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on what its tensors wrap; its outputs are on the device if it runs there."""
    if func is aten.copy_.default:
        return _copy(*args[:2])
    operation, tensors = _Operation.of(func), _tensors_in((*args, *kwargs.values()))
    on_device = has_sim = any(isinstance(tensor, SimTensor) for tensor in tensors)
    given = {name: _mapped(unwrapped, value) for name, value in kwargs.items()}
    if kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == NAME
        if on_device:
            given |= {"device": torch.device("cpu")}
            given.pop("pin_memory", None)
    if func is aten._to_copy.default and has_sim != on_device:
        _count_copy(tensors[0], to_device=on_device)
    elif has_sim or on_device:
        if has_sim and func in INDEXING and isinstance(args[0], SimTensor):
            args = _with_indices_on_device(args)
            tensors = _tensors_in(args)
        elif has_sim and operation.waits:
            _count_wait()
        operation.check_devices(tensors if has_sim else [])
        operation.count_launch()
    out = ON_CUDA_ONLY.get(func, func)(*_mapped(unwrapped, args), **given)
    if not on_device:
        return out
    if operation.is_mutable:
        same = {id(unwrapped(tensor)): tensor for tensor in tensors}
        return _mapped(lambda leaf: same[id(leaf)] if id(leaf) in same else wrapped(leaf), out)
    if operation.is_view and torch.is_inference_mode_enabled():  # a view of a usual tensor is a usual one
        with torch.inference_mode(args[0].is_inference()):
            return _mapped(wrapped, out)
    return _mapped(wrapped, out)


class _Hook(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc]
    def is_available(self) -> bool:
        return _device.is_present

    def has_primary_context(self, dev_id: int) -> bool:
        return _device.is_present

    def is_built(self) -> bool:
        return True


class _Stream:
    """A stream or an event of the device, on which everything has run when the next operation is called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def record(self, stream: _Stream | None = None) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        _count_wait()


class _Module:
    """What torch asks of ``torch.sim``."""

    Stream = Event = _Stream

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: _Stream | None) -> AbstractContextManager[None]:
        return nullcontext()

    def is_available(self) -> bool:
        return _device.is_present

    def is_initialized(self) -> bool:
        return _device.is_present

    def device_count(self) -> int:
        return int(_device.is_present)

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the CPU's: what is drawn on this device comes from there."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _register() -> torch.library.Library:
    """Register the backend with torch, and the operations by which C++ makes and fills tensors on it."""
    _setup_privateuseone_for_python_backend(NAME, _Module(), _Hook())
    library = torch.library.Library("aten", "IMPL")

    def empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> SimTensor:
        return SimTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> SimTensor:
        return SimTensor(torch.empty(size, dtype=dtype, device="cpu"))

    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("_copy_from", lambda source, target, non_blocking=False: _copy(target, source), "PrivateUse1")
    library.impl("_fused_sdp_choice", lambda *_, **__: 0, "PrivateUse1")
    return library


def _tolist(self: torch.Tensor, plain: Callable[[torch.Tensor], Any] = torch.Tensor.tolist) -> Any:
    if isinstance(self, SimTensor):
        _count_wait()
    return plain(unwrapped(self))


def _pin_memory(self: torch.Tensor) -> torch.Tensor:
    pinned = self.clone()
    setattr(pinned, PINNED, True)
    return pinned


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, plain: Any = torch.tensor, **more: Any) -> Any:
    if device is None or torch.device(device).type != NAME:
        return plain(data, dtype=dtype, device=device, **more)
    made = plain(data, dtype=dtype, **more)
    _count_copy(made, to_device=True)
    return wrapped(made)


@contextmanager
def accelerator(memory_bytes: int = UNLIMITED_BYTES) -> Iterator[Counts]:
    """Plug in a device with ``memory_bytes`` of memory while this lasts; its counts start at zero."""
    library = _register()
    _device_constructors()  # it is kept, and must know torch.tensor and not what takes its place below
    _device.counts, _device.memory_bytes, _device.is_present = Counts(), memory_bytes, True
    answers = {
        "get_memory_info": lambda *_: (memory_bytes - _device.counts.held_bytes, memory_bytes),
        "memory_allocated": lambda *_: _device.counts.held_bytes,
        "max_memory_allocated": lambda *_: _device.counts.peak_bytes,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: _count_wait(),  # torch's own asks C++, which knows no streams of this device
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "tolist", _tolist))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", _pin_memory))
        stack.enter_context(patch.object(torch, "tensor", _tensor))
        for name, function in answers.items():
            stack.enter_context(patch.object(torch.accelerator, name, function))
        stack.enter_context(patch.dict(torch.distributed.Backend.default_device_backend_map, {NAME: "gloo"}))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # a fork has no device threads
        stack.enter_context(_Mode())
        yield _device.counts
    _device.is_present = False
    del library


def on_accelerator(work: Callable[[Counts], T], memory_bytes: int = UNLIMITED_BYTES) -> T:
    """Return what ``work`` returns in a fork of this process that has the device. It must be picklable.

    Raises AssertionError with the fork's traceback if ``work`` raises.
    """

    def run(answers: Connection) -> None:
        try:
            with accelerator(memory_bytes) as counts:
                answer = work(counts), None
        except BaseException:
            answer = None, traceback.format_exc()
        buffer = BytesIO()
        torch.save(answer, buffer)
        answers.send_bytes(buffer.getvalue())

    context = multiprocessing.get_context("fork")
    answers, to_test = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(to_test,))
    process.start()
    to_test.close()
    try:
        answer, fault = torch.load(BytesIO(answers.recv_bytes()), weights_only=False)
    finally:
        process.join()
    assert fault is None, fault
    return answer  # type: ignore[no-any-return]
