"""Sends the waiting messages of webhooks: a task of the app's event loop, in every process of the API.

An attempt is one POST with an end to everything: 15 s in all, no redirect, no proxy; only the head of the response is
read.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from contextlib import suppress
from datetime import UTC, datetime

import httpx2
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from api.settings import Settings
from api.store.accounts import webhooks
from api.store.accounts.webhooks import Message, Try
from api.store.engine import Sessions, reason_of
from api.store.vault import CannotOpen
from api.webhooks import addresses, signing
from api.webhooks.addresses import NotAllowed
from api.webhooks.bodies import body_of
from quantcore.config.time_limits import WEBHOOK_S

logger = logging.getLogger(__name__)

TICK_S = 1.0
NUM_AT_ONCE = 8  # webhooks, each with one message
LEASE_S = 60.0
STOP_S = 3.0  # for messages on their way when the app ends; another process sends the rest again


class Deliverer:
    """Sends messages in the background: ``start`` in the app's event loop, ``stop`` before the database goes."""

    def __init__(self, sessions: Sessions, settings: Settings) -> None:
        self._sessions = sessions
        self._settings = settings
        self._sending: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self._stopping = True
        self._woken.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        async with httpx2.AsyncClient(
            verify=ssl.create_default_context(),  # the system's authorities; SSL_CERT_FILE names others
            trust_env=False,  # a proxy would connect to wherever the name leads by then
            follow_redirects=False,
            timeout=WEBHOOK_S,
            # No connection is used twice: it was made for one name, and the next one may share only its address.
            limits=httpx2.Limits(max_connections=NUM_AT_ONCE, max_keepalive_connections=0),
            headers={"User-Agent": "bitfoundry-webhooks/1", "Content-Type": "application/json"},
        ) as client:
            while not self._stopping:
                self._woken.clear()
                await self._begin_all(client)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), TICK_S)
            if self._sending:
                await asyncio.wait(self._sending, timeout=STOP_S)
            for task in self._sending:
                task.cancel()

    async def _begin_all(self, client: httpx2.AsyncClient) -> None:
        """Begin to send all that is due, as far as there is room."""
        while len(self._sending) < NUM_AT_ONCE and not self._stopping:
            try:
                message = await run_in_threadpool(self._claim)
            except SQLAlchemyError as error:
                logger.warning("webhooks wait: the database is unavailable (%s)", reason_of(error))
                return
            if message is None:
                return
            task = asyncio.create_task(self._deliver(client, message))
            self._sending.add(task)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._woken.set()  # there is room, and more may wait for the same webhook

    async def _deliver(self, client: httpx2.AsyncClient, message: Message) -> None:
        try:
            result = await self._try(client, message)
            await run_in_threadpool(self._record, message, result)
        except SQLAlchemyError as error:  # its lease runs out, and it is sent again
            logger.warning("%s: the database is unavailable (%s)", message.id, reason_of(error))
        except Exception:
            logger.exception("%s: a delivery failed", message.id)

    async def _try(self, client: httpx2.AsyncClient, message: Message) -> Try:
        at, started = datetime.now(UTC), time.monotonic()
        status, error, retry_after_s = None, None, 0.0
        try:
            async with asyncio.timeout(WEBHOOK_S):
                answer = await self._post(client, message)
            status, retry_after_s = answer.status_code, _retry_after_s(answer)
            if not 200 <= status < 300:
                error = f"the receiver answered {status}"
        except TimeoutError:
            error = f"no answer within {WEBHOOK_S:.0f} s"
        except (NotAllowed, CannotOpen) as reason:
            error = str(reason)
        except (httpx2.HTTPError, httpx2.InvalidURL) as reason:
            error = f"no connection ({type(reason).__name__})"  # its text may tell what our network looks like
        return Try(at, round(1000 * (time.monotonic() - started)), status, error, retry_after_s)

    async def _post(self, client: httpx2.AsyncClient, message: Message) -> httpx2.Response:
        """Return the head of the receiver's response. Raises NotAllowed, CannotOpen, and httpx2's errors."""
        vault = self._settings.vault
        if vault is None:
            raise CannotOpen("the service has no BITFOUNDRY_SECRET_KEY_FILE to sign it with")
        secret = webhooks.open_secret(vault, message)
        target = await asyncio.to_thread(addresses.locate, message.url, self._settings.webhook_networks)
        body = body_of(message, self._settings.public_url)
        headers = {"Host": target.host_header} | signing.sign(secret, message.id, int(time.time()), body)
        # The name is what the certificate is checked for, the address what is connected to.
        more = {"sni_hostname": target.host}
        async with client.stream("POST", target.url, content=body, headers=headers, extensions=more) as answer:
            return answer

    def _claim(self) -> Message | None:
        with self._sessions.begin() as session:
            return webhooks.claim(session, lease_s=LEASE_S)

    def _record(self, message: Message, result: Try) -> None:
        with self._sessions.begin() as session:
            webhooks.record(session, message, result)


def _retry_after_s(answer: httpx2.Response) -> float:
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0.0
