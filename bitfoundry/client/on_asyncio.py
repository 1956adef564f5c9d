"""Runs the client's blocking calls on asyncio, as SQLAlchemy does: each call is written once, for both ways to wait.

A call runs in a greenlet, and hands what it waits for to the event loop.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import httpx2
from greenlet import getcurrent, greenlet

from bitfoundry.client.transport import Arriving, Transport, connection_options

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
_END: Any = object()


async def run(work: Callable[[], T]) -> T:
    """Run `work` and return its result. Whenever it calls `wait_for`, the event loop serves other tasks."""
    child = greenlet(work)
    child.gr_context = getcurrent().gr_context
    result = child.switch()
    while not child.dead:
        try:
            arrived = await result
        except BaseException as error:  # a cancellation, too: the call tidies up, and may wait while it does
            result = child.throw(error)
        else:
            result = child.switch(arrived)
    return cast(T, result)


def wait_for(awaited: Awaitable[T]) -> T:
    """Return the result of `awaited`. Only for code inside `run`."""
    loop = getcurrent().parent
    assert loop is not None
    return cast(T, loop.switch(awaited))


class Twin(Generic[S]):
    """Has the methods of an `S`, each made by `asked` or `streamed`."""

    def __init__(self, original: S) -> None:
        self._original = original


def asked(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Twin[S], P], Coroutine[Any, Any, T]]:
    """The same method, to be awaited."""

    @functools.wraps(method)
    async def ask(twin: Twin[S], /, *arguments: P.args, **options: P.kwargs) -> T:
        return await run(lambda: method(twin._original, *arguments, **options))

    return ask


def streamed(
    method: Callable[Concatenate[S, P], Iterator[T]],
) -> Callable[Concatenate[Twin[S], P], AsyncGenerator[T, None]]:
    """The same method, for `async for`."""

    @functools.wraps(method)
    async def stream(twin: Twin[S], /, *arguments: P.args, **options: P.kwargs) -> AsyncGenerator[T, None]:
        found = method(twin._original, *arguments, **options)
        try:
            while (each := await run(lambda: next(found, _END))) is not _END:
                yield each
        finally:
            if close := getattr(found, "close", None):
                await run(close)

    return stream


class AsyncTransport(Transport):
    """The transport within `run`."""

    def __init__(
        self, base_url: str, api_key: str, *, timeout_s: float, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._async_http = httpx2.AsyncClient(**connection_options(base_url, api_key, timeout_s), transport=transport)

    @property
    def trusts_environment(self) -> bool:
        return self._async_http.trust_env

    def pause(self, seconds: float) -> None:
        wait_for(asyncio.sleep(seconds))

    def close(self) -> None:
        wait_for(self._async_http.aclose())

    def _request(self, method: str, path: str, **sent: Any) -> httpx2.Response:
        return wait_for(self._async_http.request(method, path, **sent))

    @contextmanager
    def _open(self, path: str, **sent: Any) -> Iterator[Arriving]:
        opening = self._async_http.stream("GET", path, **sent)
        answer = wait_for(opening.__aenter__())
        try:
            yield _Arriving(answer)
        finally:
            wait_for(opening.__aexit__(None, None, None))


class _Arriving:
    """An answer of httpx2's that is read within `run`."""

    def __init__(self, answer: httpx2.Response) -> None:
        self._answer = answer

    @property
    def status_code(self) -> int:
        return self._answer.status_code

    def iter_lines(self) -> Iterator[str]:
        return _iterated(self._answer.aiter_lines())

    def iter_bytes(self) -> Iterator[bytes]:
        return _iterated(self._answer.aiter_bytes())

    def read(self) -> bytes:
        return wait_for(self._answer.aread())

    def json(self) -> Any:
        return self._answer.json()


def _iterated(found: AsyncIterator[T]) -> Iterator[T]:
    while True:
        try:
            each = wait_for(anext(found))
        except StopAsyncIteration:
            return
        yield each
