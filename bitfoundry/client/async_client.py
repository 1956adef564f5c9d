"""The client for programs on asyncio: the calls of `bitfoundry.client.service`, to be awaited.

async with AsyncClient("http://127.0.0.1:8765", api_key) as client:
    job = await client.submit("/models/SmolLM2-135M", config="w4a16")
    async for event in client.stream_events(job.id):
        print(event.kind)
"""

from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2

from bitfoundry.client.account import Account
from bitfoundry.client.chats import Chats
from bitfoundry.client.connection import Connection
from bitfoundry.client.datasets import Datasets
from bitfoundry.client.on_asyncio import AsyncTransport, Twin, asked, run, streamed
from bitfoundry.client.registry import Registry
from bitfoundry.client.retention import Retention
from bitfoundry.client.service import Client
from bitfoundry.client.shares import Shares
from bitfoundry.client.webhooks import Webhooks


class AsyncAccount(Twin[Account]):
    """Calls for members, keys, tokens, projects, workers and the audit log."""

    create_key = asked(Account.create_key)
    keys = asked(Account.keys)
    own_key = asked(Account.own_key)
    rotate_key = asked(Account.rotate_key)
    revoke_key = asked(Account.revoke_key)
    members = asked(Account.members)
    add_member = asked(Account.add_member)
    edit_member = asked(Account.edit_member)
    remove_member = asked(Account.remove_member)
    put_hub_token = asked(Account.put_hub_token)
    hub_tokens = asked(Account.hub_tokens)
    delete_hub_token = asked(Account.delete_hub_token)
    projects = asked(Account.projects)
    create_project = asked(Account.create_project)
    edit_project = asked(Account.edit_project)
    usage = asked(Account.usage)
    workers = asked(Account.workers)
    order_worker = asked(Account.order_worker)
    audit = streamed(Account.audit)


class AsyncWebhooks(Twin[Webhooks]):
    """Calls for webhooks: addresses to which the service sends events."""

    create = asked(Webhooks.create)
    list = asked(Webhooks.list)
    get = asked(Webhooks.get)
    edit = asked(Webhooks.edit)
    delete = asked(Webhooks.delete)
    test = asked(Webhooks.test)
    deliveries = streamed(Webhooks.deliveries)
    redeliver = asked(Webhooks.redeliver)


class AsyncChats(Twin[Chats]):
    """Calls for chats with a job's result and its original."""

    open = asked(Chats.open)
    of_job = asked(Chats.of_job)
    get = asked(Chats.get)
    ask = asked(Chats.ask)
    stream = streamed(Chats.stream)
    say = asked(Chats.say)
    end = asked(Chats.end)


class AsyncDatasets(Twin[Datasets]):
    """Calls for uploaded data files."""

    upload = asked(Datasets.upload)
    list = streamed(Datasets.list)
    get = asked(Datasets.get)
    preview = asked(Datasets.preview)
    statistics = asked(Datasets.statistics)
    delete = asked(Datasets.delete)


class AsyncRegistry(Twin[Registry]):
    """Calls for the model registry."""

    models = streamed(Registry.models)
    model = asked(Registry.model)
    versions = streamed(Registry.versions)
    version = asked(Registry.version)
    find_version = asked(Registry.find_version)
    add = asked(Registry.add)
    move_alias = asked(Registry.move_alias)
    remove_alias = asked(Registry.remove_alias)
    remove_version = asked(Registry.remove_version)
    remove_model = asked(Registry.remove_model)
    request = asked(Registry.request)
    requests = streamed(Registry.requests)
    approve = asked(Registry.approve)
    refuse = asked(Registry.refuse)
    withdraw = asked(Registry.withdraw)
    protected_aliases = asked(Registry.protected_aliases)
    protect = asked(Registry.protect)


class AsyncRetention(Twin[Retention]):
    """Calls for the retention policy of a project."""

    show = asked(Retention.show)
    set = asked(Retention.set)
    preview = asked(Retention.preview)
    run = asked(Retention.run)


class AsyncShares(Twin[Shares]):
    """Calls for read-only links to a run's report."""

    create = asked(Shares.create)
    list = asked(Shares.list)
    revoke = asked(Shares.revoke)


class AsyncClient(Twin[Client]):
    """A `Client` for an event loop: any number of its calls may run at a time. Its errors are the same."""

    submit = asked(Client.submit)
    plan = asked(Client.plan)
    get = asked(Client.get)
    find = asked(Client.find)
    list = streamed(Client.list)
    summary = asked(Client.summary)
    edit = asked(Client.edit)
    delete = asked(Client.delete)
    clone = asked(Client.clone)
    cancel = asked(Client.cancel)
    pause = asked(Client.pause)
    resume = asked(Client.resume)
    retry = asked(Client.retry)
    publish = asked(Client.publish)
    plan_publication = asked(Client.plan_publication)
    wait_published = asked(Client.wait_published)
    submit_sweep = asked(Client.submit_sweep)
    sweeps = streamed(Client.sweeps)
    sweep = asked(Client.sweep)
    cancel_sweep = asked(Client.cancel_sweep)
    events = streamed(Client.events)
    stream_events = streamed(Client.stream_events)
    logs = streamed(Client.logs)
    stream_logs = streamed(Client.stream_logs)
    inspect = asked(Client.inspect)
    models = streamed(Client.models)
    model_folders = asked(Client.model_folders)
    results_of = asked(Client.results_of)
    presets = asked(Client.presets)
    readiness = asked(Client.readiness)
    wait = asked(Client.wait)
    artifacts = asked(Client.artifacts)
    report = asked(Client.report)
    change = asked(Client.change)
    download = asked(Client.download)
    download_tar = asked(Client.download_tar)

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        home: Path | None = None,
        timeout_s: float = 30.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect to a service; without an address and a key to the one that the commands find (`Connection.find`)."""
        connection = Connection.find(base_url, api_key, home)
        super().__init__(
            Client.over(AsyncTransport(connection.url, connection.api_key, timeout_s=timeout_s, transport=transport))
        )
        self.account = AsyncAccount(self._original.account)
        self.chats = AsyncChats(self._original.chats)
        self.webhooks = AsyncWebhooks(self._original.webhooks)
        self.datasets = AsyncDatasets(self._original.datasets)
        self.registry = AsyncRegistry(self._original.registry)
        self.retention = AsyncRetention(self._original.retention)
        self.shares = AsyncShares(self._original.shares)

    async def close(self) -> None:
        await run(self._original.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
