"""Webhooks from the change of a job to a real receiver's socket, and back again when the receiver is ill."""

import base64
import datetime as dt
import hmac
import ipaddress
import json
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store.accounts import webhooks
from api.store.engine import Sessions
from api.store.queue import control, leases
from api.store.queue.events import NewEvent
from api.webhooks.schemas import EventType
from tests.support.receiver import Message, Receiver, serve
from tests.support.service import Server
from tests.support.waiting import PATIENCE_S, give_time, wait_until

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
Submit = Callable[..., str]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serve() as receiver:
        yield receiver


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"webhook_networks": LOOPBACK})


@pytest.fixture(autouse=True)
def messages_go_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.webhooks.deliverer.TICK_S", 0.1)


def subscribe(client: Any, url: str, *event_types: str) -> dict[str, Any]:
    answer = client.post("/v1/webhooks", json={"url": url, "event_types": event_types or ["job.queued"]})
    assert answer.status_code == 201, answer.text
    return answer.json()  # type: ignore[no-any-return]


def deliveries(client: Any, hook: dict[str, Any]) -> list[dict[str, Any]]:
    return client.get(f"/v1/webhooks/{hook['id']}/deliveries").json()["data"]  # type: ignore[no-any-return]


def wait_tries(client: Any, hook: dict[str, Any], number: int, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    """The newest delivery once its tries have been recorded."""
    wait_until(
        lambda: any(len(delivery["tries"]) >= number for delivery in deliveries(client, hook)[:1]),
        timeout_s=timeout_s,
        note=lambda: deliveries(client, hook),
    )
    return deliveries(client, hook)[0]


def hurry(sessions: Sessions) -> None:
    """As if the time until the next try were over."""
    with sessions.begin() as session:
        session.execute(text("UPDATE webhook_delivery SET next_try_at = clock_timestamp()"))


def is_signed(message: Message, secret: str) -> bool:
    """Standard Webhooks, read from its specification: HMAC-SHA256 of `id.timestamp.body` under the decoded secret."""
    signed = b".".join(
        (message.headers["webhook-id"].encode(), message.headers["webhook-timestamp"].encode(), message.body)
    )
    digest = hmac.digest(base64.b64decode(secret.split("_")[1]), signed, "sha256")
    return any(
        hmac.compare_digest(each, "v1," + base64.b64encode(digest).decode())
        for each in message.headers["webhook-signature"].split(" ")
    )


# what arrives


def test_a_change_of_a_job_arrives_signed(
    client: TestClient, receiver: Receiver, submit: Submit, sessions: Sessions
) -> None:
    hook = subscribe(client, receiver.url, "job.queued", "job.failed")
    assert hook["secret"].startswith("whsec_") and len(base64.b64decode(hook["secret"][6:])) == 32
    job_id = submit(name="nightly", labels={"team": "search"})
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)  # job.running: not subscribed to
        assert lease
        leases.fail(session, lease, leases.Failure("bad", "no good"), retry_base_s=1)
    first, second = receiver.wait(2)
    assert (first.path, first.headers["content-type"]) == ("/hook?x=1", "application/json")
    assert first.headers["host"] == receiver.url.split("/")[2]
    assert first.content["type"] == "job.queued"
    assert first.content["data"] == {
        "id": job_id, "project_id": "prj_" + "0" * 32, "name": "nightly", "labels": {"team": "search"},
        "model": "/nowhere", "state": "queued",
    }  # fmt: skip
    assert second.content["data"]["error"]["code"] == "bad"
    assert (second.content["data"]["state"], second.content["data"]["attempt"]) == ("failed", 1)
    dt.datetime.fromisoformat(first.content["timestamp"])
    for message in (first, second):
        assert is_signed(message, hook["secret"])
        assert abs(int(message.headers["webhook-timestamp"]) - time.time()) < 60
        assert len(message.body) < 20_000
    assert not is_signed(first, "whsec_" + base64.b64encode(bytes(32)).decode())
    first.body += b" "
    assert not is_signed(first, hook["secret"])
    delivered = wait_tries(client, hook, 1)
    assert (delivered["state"], delivered["num_tries"], delivered["next_try_at"]) == ("delivered", 1, None)
    assert (delivered["tries"][0]["status"], delivered["tries"][0]["error"]) == (204, None)
    assert delivered["id"] == second.headers["webhook-id"]
    assert 0 <= delivered["tries"][0]["latency_ms"] < 15_000


def test_every_state_has_its_event() -> None:
    assert get_args(EventType) and set(get_args(EventType)) == set(webhooks.EVENT_TYPES)


def test_only_what_committed_is_told(
    client: TestClient, receiver: Receiver, sessions: Sessions, submit: Submit
) -> None:
    """The row of a delivery is in the transaction of the change; and an engine's word makes none."""
    hook = subscribe(client, receiver.url, "job.cancelled", "job.succeeded")
    job_id = submit()
    with pytest.raises(RuntimeError), sessions.begin() as session:
        control.cancel(session, job_id)
        raise RuntimeError
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        assert lease
        forged = NewEvent("state_changed", {"state": "succeeded"})
        leases.record(session, lease, happened=[forged], columns={})
    assert deliveries(client, hook) == []
    with sessions.begin() as session:
        control.cancel(session, job_id)
        leases.release(session, lease)
    assert [each["event_type"] for each in deliveries(client, hook)] == ["job.cancelled"]


def test_projects_hear_of_their_own(client: TestClient, receiver: Receiver, submit: Submit) -> None:
    project = client.post("/v1/projects", json={"name": "other"}).json()["id"]
    key = client.post("/v1/keys", json={"name": "k", "scopes": ["admin"], "project_id": project}).json()["key"]
    other = {"Authorization": f"Bearer {key}"}
    foreign = client.post("/v1/webhooks", json={"url": receiver.url, "event_types": ["job.queued"]}, headers=other)
    mine = subscribe(client, receiver.url)
    job_id = submit()
    foreign_job = submit(project_id=project)
    told = {message.content["data"]["id"]: message for message in receiver.wait(2)}
    assert is_signed(told[job_id], mine["secret"])
    assert is_signed(told[foreign_job], foreign.json()["secret"])
    assert len(receiver.messages) == 2


def test_the_secret_is_shown_once_and_sealed(client: TestClient, receiver: Receiver, sessions: Sessions) -> None:
    hook = subscribe(client, receiver.url)
    key = hook["secret"].removeprefix("whsec_")
    for path in ("/v1/webhooks", f"/v1/webhooks/{hook['id']}", "/v1/audit"):
        assert key not in client.get(path).text
    with sessions.begin() as session:
        rows = "".join(str(row) for row in session.execute(text("SELECT to_jsonb(w) FROM webhook w")))
    assert key not in rows and base64.b64decode(key).hex() not in rows


def test_many_messages_arrive_once_each_and_in_order(
    client: TestClient, receiver: Receiver, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.webhooks.deliverer.TICK_S", 1.0)
    subscribe(client, receiver.url)
    ids = [submit() for _ in range(30)]
    started = time.monotonic()
    assert [message.content["data"]["id"] for message in receiver.wait(30)] == ids
    assert time.monotonic() - started < 25  # one a second would take 30


def test_two_processes_send_each_message_once(
    settings: Settings, client: TestClient, receiver: Receiver, sessions: Sessions, submit: Submit
) -> None:
    hook = subscribe(client, receiver.url)
    with TestClient(create_app(settings)):
        for _ in range(30):
            submit()
        receiver.wait(30)
        wait_tries(client, hook, 1)
        give_time(0.3)
    assert len({message.headers["webhook-id"] for message in receiver.messages}) == len(receiver.messages) == 30


# channels of Slack and Teams


@pytest.mark.parametrize("form", ["slack", "teams"])
def test_a_channel_gets_a_message_that_people_read(
    settings: Settings, sessions: Sessions, receiver: Receiver, submit: Submit, form: str
) -> None:
    """Signed and tried again as any other; with a link, since the service knows its address."""
    named = settings.model_copy(update={"public_url": "https://bitfoundry.example.org"})
    with TestClient(create_app(named), headers={"Authorization": f"Bearer {create_key(sessions, 'k')}"}) as client:
        asked = {"url": receiver.url, "event_types": ["job.succeeded"], "format": form}
        hook = client.post("/v1/webhooks", json=asked).json()
        assert hook["format"] == form
        job_id = submit("/models/tiny", name="<!here> *x*")
        receiver.answers = [(429, {"Retry-After": "0"}, 0)]
        verdict = {"level": "good", "reason": "KL divergence 0.01"}
        with sessions.begin() as session:
            lease = leases.claim(session, worker="w", lease_s=60)
            assert lease
            done = {"manifest_sha256": "0" * 64, "path": "/x", "num_bytes": 1, "summary": {"verdict": verdict}}
            leases.succeed(session, lease, **done)  # type: ignore[arg-type]
        wait_tries(client, hook, 1)
        hurry(sessions)
        first, second = receiver.wait(2)
        assert wait_tries(client, hook, 2)["state"] == "delivered"
    assert first.body == second.body and is_signed(second, hook["secret"])
    text = second.body.decode()
    for part in ("good: KL divergence 0.01", "tiny", f"https://bitfoundry.example.org/ui/jobs/{job_id}"):
        assert part in text
    assert ("&lt;!here&gt;" if form == "slack" else "<!here>") in text


def test_the_format_changes_and_only_the_host_of_a_channel_is_audited(client: TestClient) -> None:
    place = f"/v1/webhooks/{subscribe(client, 'http://127.0.0.1:9/')['id']}"
    changed = client.patch(place, json={"format": "slack", "url": "http://127.0.0.1:9/services/T0/B0/s3cr3t"})
    assert (changed.status_code, changed.json()["format"]) == (200, "slack")
    made = {"format": "teams", "url": "http://127.0.0.1:9/workflows/s3cr3t", "event_types": ["job.failed"]}
    assert client.post("/v1/webhooks", json=made).status_code == 201
    audited = client.get("/v1/audit").text
    assert "s3cr3t" not in audited and "http://127.0.0.1/…" in audited
    refused = client.patch(place, json={"format": "discord"})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "#/format")


# receivers that are ill


@pytest.mark.slow
def test_what_fails_is_tried_again_later(
    client: TestClient, receiver: Receiver, sessions: Sessions, submit: Submit
) -> None:
    hook = subscribe(client, receiver.url)
    receiver.answers = [(500, {}, 0), (302, {"Location": receiver.url}, 0), (429, {"Retry-After": "7200"}, 0)]
    submit()
    wanted = [5, 300, 7200]
    for number, delay_s in enumerate(wanted, 1):
        delivery = wait_tries(client, hook, number)
        assert delivery["state"] == "pending"
        last = dt.datetime.fromisoformat(delivery["tries"][-1]["at"])
        wait_s = (dt.datetime.fromisoformat(delivery["next_try_at"]) - last).total_seconds()
        assert delay_s <= wait_s <= 1.2 * delay_s + 5
        assert client.get(f"/v1/webhooks/{hook['id']}").json()["failing_since"]
        hurry(sessions)
    done = wait_tries(client, hook, 4)
    assert [each["status"] for each in done["tries"]] == [500, 302, 429, 204]
    assert done["tries"][0]["error"] == "the receiver answered 500"
    assert (done["state"], done["num_tries"]) == ("delivered", 4)
    assert len({(message.headers["webhook-id"], message.body) for message in receiver.messages}) == 1
    assert len(receiver.messages) == 4  # the redirect was not followed
    assert all(is_signed(message, hook["secret"]) for message in receiver.messages)
    assert client.get(f"/v1/webhooks/{hook['id']}").json()["failing_since"] is None


@pytest.mark.slow
def test_it_is_given_up_after_ten_tries(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    hook = subscribe(client, "http://127.0.0.1:9/")
    submit()
    for number in range(1, 11):
        given_up = wait_tries(client, hook, number)
        hurry(sessions)
    assert (given_up["state"], given_up["num_tries"], given_up["next_try_at"]) == ("failed", 10, None)
    assert given_up["tries"][0]["error"] == "no connection (ConnectError)"
    give_time(1.5)
    assert len(deliveries(client, hook)[0]["tries"]) == 10


@pytest.mark.slow
def test_a_webhook_that_fails_for_days_is_disabled(
    client: TestClient, receiver: Receiver, sessions: Sessions, submit: Submit
) -> None:
    hook = subscribe(client, receiver.url)
    place = f"/v1/webhooks/{hook['id']}"
    receiver.status = 503
    submit()
    wait_tries(client, hook, 1)
    assert client.get(place).json()["disabled_at"] is None
    with sessions.begin() as session:
        session.execute(text("UPDATE webhook SET failing_since = clock_timestamp() - interval '5 days 1 minute'"))
    hurry(sessions)
    wait_tries(client, hook, 2)
    shown = client.get(place).json()
    assert shown["disabled_reason"] == "nothing could be delivered for 5 days"
    submit()
    assert len(deliveries(client, hook)) == 1  # nothing is queued for it
    hurry(sessions)
    give_time(1.5)
    assert len(receiver.messages) == 2
    for place_of in (f"{place}/test", f"{place}/deliveries/{deliveries(client, hook)[0]['id']}/redeliver"):
        refused = client.post(place_of)
        assert (refused.status_code, refused.json()["code"]) == (409, "webhook_disabled")
    receiver.status = 204
    again = client.patch(place, json={"enabled": True}).json()
    assert (again["disabled_at"], again["failing_since"]) == (None, None)
    assert wait_tries(client, hook, 3)["state"] == "delivered"


def test_gone_is_gone(client: TestClient, receiver: Receiver, submit: Submit) -> None:
    hook = subscribe(client, receiver.url)
    receiver.status = 410
    submit()
    wait_tries(client, hook, 1)
    assert client.get(f"/v1/webhooks/{hook['id']}").json()["disabled_reason"] == "the receiver answered 410 Gone"


@pytest.mark.slow
def test_slow_receivers_keep_nobody_waiting(
    client: TestClient, receiver: Receiver, submit: Submit, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor themselves for ever: a try has an end."""
    monkeypatch.setattr("api.webhooks.deliverer.WEBHOOK_S", 2.0)
    with serve() as asleep:
        asleep.answers = [(204, {}, 6.0)] * 5
        hook = subscribe(client, asleep.url)
        subscribe(client, receiver.url)
        started = time.monotonic()
        job_ids = [submit() for _ in range(5)]
        receiver.wait(5)
        took_s = time.monotonic() - started
        assert len(asleep.messages) < 5  # the other one has all of its messages before
        assert len(asleep.messages) <= 1 + took_s / 2  # one at a time, each given up after two seconds

        def tries() -> Any:
            return next(each["tries"] for each in deliveries(client, hook) if each["data"]["id"] == job_ids[0])

        first = wait_until(tries)[0]
        assert (first["status"], first["error"]) == (None, "no answer within 2 s")


@pytest.mark.slow
def test_what_a_dead_process_was_sending_is_sent_again(
    client: TestClient, receiver: Receiver, sessions: Sessions, submit: Submit
) -> None:
    hook = subscribe(client, receiver.url)
    with sessions.begin() as session:
        session.execute(text("UPDATE webhook SET busy_until = clock_timestamp() + interval '3 s'"))
    submit()
    give_time(1.2)
    assert deliveries(client, hook)[0]["tries"] == []
    assert wait_tries(client, hook, 1)["state"] == "delivered"


# buttons


def test_test_and_redeliver(client: TestClient, receiver: Receiver, submit: Submit) -> None:
    hook = subscribe(client, receiver.url, "job.failed")
    place = f"/v1/webhooks/{hook['id']}"
    queued = client.post(f"{place}/test").json()
    assert (queued["event_type"], queued["state"]) == ("webhook.test", "pending")
    [message] = receiver.wait(1)
    assert message.content["type"] == "webhook.test" and is_signed(message, hook["secret"])
    wait_tries(client, hook, 1)
    again = client.post(f"{place}/deliveries/{queued['id']}/redeliver")
    assert (again.status_code, again.json()["state"]) == (202, "pending")
    first, second = receiver.wait(2)
    assert (first.headers["webhook-id"], first.body) == (second.headers["webhook-id"], second.body)
    done = wait_tries(client, hook, 2)
    assert (done["state"], done["num_tries"], len(done["tries"])) == ("delivered", 1, 2)
    other = subscribe(client, receiver.url)
    strange = client.post(f"/v1/webhooks/{other['id']}/deliveries/{queued['id']}/redeliver")
    assert (strange.status_code, strange.json()["code"]) == (404, "delivery_not_found")
    assert client.delete(place).status_code == 204
    assert client.get(place).status_code == 404


def test_deliveries_page_by_page(client: TestClient, receiver: Receiver, submit: Submit) -> None:
    hook = subscribe(client, receiver.url)
    ids = [submit() for _ in range(5)]
    receiver.wait(5)
    wait_tries(client, hook, 1)
    found = []
    page = client.get(f"/v1/webhooks/{hook['id']}/deliveries", params={"limit": 2, "state": "delivered"})
    while True:
        found += [each["data"]["id"] for each in page.json()["data"]]
        if not page.json()["has_more"]:
            break
        page = client.get(page.headers["link"].split(";")[0].strip("<>"))
    assert found == ids[::-1]
    pending = client.get(f"/v1/webhooks/{hook['id']}/deliveries", params={"state": "pending"})
    assert pending.json()["data"] == []


def test_changes(client: TestClient, receiver: Receiver, submit: Submit) -> None:
    hook = subscribe(client, receiver.url)
    place = f"/v1/webhooks/{hook['id']}"
    changed = client.patch(place, json={"event_types": ["job.paused"]}).json()
    assert (changed["event_types"], changed["url"]) == (["job.paused"], receiver.url)
    submit()
    assert deliveries(client, hook) == []
    off = client.patch(place, json={"enabled": False}).json()
    assert off["disabled_reason"] == "on request"
    for bad in ({"url": "https://169.254.169.254/"}, {"event_types": []}, {"event_types": ["job.*"]}, {"url": None}):
        assert client.patch(place, json=bad).status_code == 422
    for number in range(19):
        subscribe(client, f"http://127.0.0.1:{number + 1}/")
    full = client.post("/v1/webhooks", json={"url": receiver.url, "event_types": ["job.queued"]})
    assert (full.status_code, full.json()["code"]) == (429, "quota_exceeded")


def test_old_deliveries_are_forgotten(
    client: TestClient, receiver: Receiver, sessions: Sessions, submit: Submit
) -> None:
    hook = subscribe(client, receiver.url)
    submit()
    wait_tries(client, hook, 1)
    submit()
    with sessions.begin() as session:
        oldest = "(SELECT min(id) FROM webhook_delivery)"
        long_ago = "created_at = now() - interval '31 days'"
        session.execute(text(f"UPDATE webhook_delivery SET {long_ago} WHERE id = {oldest}"))
    wait_until(lambda: len(deliveries(client, hook)) <= 1)


# where nothing may go


FORBIDDEN = (
    "http://example.org/",
    "https://127.0.0.1/",
    "https://localhost/",
    "https://169.254.169.254/latest/meta-data/",
    "https://2130706433/",
    "https://[::1]/",
    "https://10.0.0.1/",
    "file:///etc/passwd",
    "https://u:p@example.org/",
)


def test_a_webhook_that_may_not_be(subtests: pytest.Subtests, settings: Settings, sessions: Sessions) -> None:
    strict = settings.model_copy(update={"webhook_networks": ()})
    with TestClient(create_app(strict), headers={"Authorization": f"Bearer {create_key(sessions, 'k')}"}) as client:
        for url in FORBIDDEN:
            with subtests.test(url):
                answer = client.post("/v1/webhooks", json={"url": url, "event_types": ["job.queued"]})
                assert (answer.status_code, answer.json()["code"]) == (422, "webhook_url_not_allowed")
                assert answer.json()["errors"][0]["pointer"] == "#/url"


def test_a_name_that_changes_its_meaning(
    settings: Settings, sessions: Sessions, receiver: Receiver, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: public when the webhook is made, ours when the message goes out. It is checked at every try."""
    strict = settings.model_copy(update={"webhook_networks": ()})
    meaning = ["93.184.215.14"]
    monkeypatch.setattr("api.webhooks.addresses.resolve", lambda host, port: meaning)
    port = receiver.url.split(":")[2].split("/")[0]
    with TestClient(create_app(strict), headers={"Authorization": f"Bearer {create_key(sessions, 'k')}"}) as client:
        hook = subscribe(client, f"https://hooks.example.org:{port}/")
        meaning[0] = "127.0.0.1"
        submit()
        refused = wait_tries(client, hook, 1)
    assert refused["tries"][0]["error"] == "'hooks.example.org' is not a public address"
    assert receiver.messages == []


def test_tls_is_checked_for_the_name_and_connected_to_the_address(
    settings: Settings, sessions: Sessions, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate for the name is accepted, one for another name is not, though both lead to one address."""
    key, certificate = make_certificate(tmp_path, "hooks.example.org")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    names: list[str | None] = []
    context.sni_callback = lambda connection, name, _: names.append(name)
    monkeypatch.setattr("api.webhooks.addresses.resolve", lambda host, port: ["127.0.0.1"])
    headers = {"Authorization": f"Bearer {create_key(sessions, 'k')}"}
    with serve(context) as receiver, TestClient(create_app(settings), headers=headers) as client:
        port = receiver.url.split(":")[2].split("/")[0]
        right = subscribe(client, f"https://hooks.example.org:{port}/right")
        wrong = subscribe(client, f"https://other.example.org:{port}/wrong")
        submit()
        assert wait_tries(client, right, 1)["state"] == "delivered"
        assert "ConnectError" in wait_tries(client, wrong, 1)["tries"][0]["error"]
    assert [message.path for message in receiver.messages] == ["/right"]
    assert receiver.messages[0].headers["host"] == f"hooks.example.org:{port}"
    assert set(names) == {"hooks.example.org", "other.example.org"}


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """(private key, self-signed certificate for ``name``)."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "key.pem", folder / "certificate.pem"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    paths[0].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    paths[1].write_bytes(certificate.public_bytes(pem))
    return paths


def test_the_commands(
    server: Server, receiver: Receiver, submit: Submit, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from bitfoundry.commands import main as cli

    monkeypatch.setenv("BITFOUNDRY_URL", server.url)
    monkeypatch.setenv("BITFOUNDRY_API_KEY", server.key)

    def command(line: str, *, as_json: bool = True) -> Any:
        capsys.readouterr()
        assert cli.run([*line.split(), *(["--json"] if as_json else [])]) == 0
        said = capsys.readouterr().out
        return json.loads(said) if as_json else said

    hook = command(f"webhooks create {receiver.url} --event job.queued")
    submit()
    [message] = receiver.wait(1)
    assert is_signed(message, hook["secret"])
    command(f"webhooks test {hook['id']}")
    receiver.wait(2)
    with server.connect() as client:
        wait_tries(client, hook, 1)
    sent = command(f"webhooks deliveries {hook['id']} --state delivered")
    assert [each["event_type"] for each in sent] == ["webhook.test", "job.queued"]
    monkeypatch.setenv("COLUMNS", "200")  # or the last cell may take two lines
    assert "204 (" in command(f"webhooks deliveries {hook['id']}", as_json=False)
    assert command(f"webhooks redeliver {hook['id']} {sent[0]['id']}")["state"] == "pending"
    assert command(f"webhooks edit {hook['id']} --disable --event job.failed")["disabled_reason"] == "on request"
    assert command(f"webhooks edit {hook['id']} --enable")["disabled_reason"] is None
    assert [each["event_types"] for each in command("webhooks list")] == [["job.failed"]]
    assert command(f"webhooks delete {hook['id']}") == {"deleted": hook["id"]}
    assert command("webhooks list") == []
    made = command(f"webhooks create {receiver.url} --format slack")
    assert made["event_types"] == ["job.succeeded", "job.failed", "job.cancelled"]
    assert made["format"] == "slack"
    assert command(f"webhooks edit {made['id']} --format teams")["format"] == "teams"
