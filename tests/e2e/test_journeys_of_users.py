"""Four people and what they came for, on real models, the real service and a real browser.

A hobbyist with a shell, an ML engineer with Python, an MLOps lead with a shell and HTTP, a manager with the dashboard.
Each step asserts what it must show; each journey prints its steps and minutes. No person sees what another made: each
has a project, a data folder or both. The calibration is small, since the figures are not what is tested here.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from gguf import GGUFReader
from playwright.sync_api import Page, expect

from bitfoundry.client.service import Client
from bitfoundry.errors import ApiError
from bitfoundry.local import demo_model
from bitfoundry.local.stack import LocalStack
from tests.support.chromium import TOO_WIDE, open_browser
from tests.support.journeys import Journey, environment_of
from tests.support.real_models import gemma
from tests.support.receiver import serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LITTLE_TEXT = {"source": "builtin", "num_samples": 2, "seq_len": 64}
LITTLE_EVALUATION = {"num_windows": 8, "seq_len": 64, "num_prompts": 1, "num_answers": 0}  # a paired test needs eight
JOB_LIMIT_S = 1800  # for a minute on an idle core
WAIT_MS = 120_000


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return demo_model.prepare(print)


@pytest.fixture(scope="module")
def stack(smollm2: Path) -> Iterator[LocalStack]:
    """The service, as its operator starts it: webhooks may go to this machine, and artifacts into one folder."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as folder:
        patch.setenv("BITFOUNDRY_PUBLISH_URLS", f"file://{folder}/published")
        patch.setenv("BITFOUNDRY_WEBHOOK_NETWORKS", "127.0.0.0/8")
        patch.setenv("BITFOUNDRY_LEASE_S", "120")  # the machine may be busy
        for name in ("DATABASE_URL", "BROKER_URL"):
            patch.delenv(name, raising=False)
        with LocalStack(Path(folder) / "home", 0, model_roots=[smollm2.parent]) as stack:
            yield stack


@pytest.fixture
def journey(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Journey]:
    """The journey of the person that the test is named after, in a shell that knows no service; printed at its end."""
    person = request.node.name.removeprefix("test_the_").partition("_")[0].replace("mlops", "MLOps lead")
    journey = Journey(person, tmp_path, environment_of(tmp_path / "home"))
    yield journey
    with capsys.disabled():
        print(f"\n{journey.summary()}")


def key_of_project(stack: LocalStack, name: str, *scopes: str) -> str:
    """Return a key for a new project, for a person whose lists shall be empty at first."""
    with Client(stack.url, stack.api_key) as operator:
        project = operator.account.create_project(name)
        key = operator.account.create_key(name, list(scopes), project_id=project.id)
    assert key.key
    return key.key


def test_the_hobbyist_makes_a_gguf_file_and_talks_to_it(journey: Journey, smollm2: Path) -> None:
    """No service runs. The names are those of llama.cpp; mistakes are answered with the right name."""
    person, model = journey, gemma()
    with person.step("look for the types"):
        said = person.bitfoundry("presets")
        assert "Q4_K_M" in said and "IQ3_XS" in said
    with person.step("look at the model"):
        said = person.bitfoundry("inspect", model)
        assert "Q4_K" in said, "it was unpacked from a Q4_K_M file"
        assert "already lie on a grid" in " ".join(said.split())
    with person.step("mistake: a type that is none"):
        said = person.bitfoundry("quantize", model, "q4_k_n", status=1)
        assert "Did you mean 'Q4_K" in said and "Q4_K_M" in said and "unknown_preset" in said
    with person.step("mistake: a model that is not there"):
        said = person.bitfoundry("quantize", model.with_name("modle"), "Q4_0", status=1)
        assert "model_not_found" in said and str(model.with_name("modle")) in "".join(said.split())
    with person.step("mistake: a scheme that no GGUF file holds"):
        said = " ".join(person.bitfoundry("quantize", smollm2, "w4a16", "--model_export", "gguf", status=1).split())
        assert "Presets that gguf can store" in said and "Q4_K_M" in said
    with person.step("quantize"):
        fast = ["--effort", "fast", "--skip_evaluation"]
        said = person.bitfoundry("quantize", model, "Q4_0", *fast, "-o", "gemma-q4")
        (file,) = (person.folder / "gemma-q4").glob("*.gguf")
        assert file.name.endswith("-Q4_0.gguf")
        before = sum(each.stat().st_size for each in model.glob("*.safetensors"))
        assert file.stat().st_size < 0.5 * before, "the embedding is quantized, too"
        assert file.name in said, "how to load it, with the file's name"
        types = {tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
        assert "Q4_0" in types and "BF16" not in types
    with person.step("find it again"):
        assert "gemma-q4" in person.bitfoundry("list") and "Q4_0" in person.bitfoundry("show", "last")
    with person.step("talk to it beside its original"):
        said = person.bitfoundry("chat", "last", "--prompt", "The capital of France is", "--max_new_tokens", "8")
        assert "The capital of France is" in said and "original" in said.lower() and "quantized" in said.lower()
    with person.step("ask for less than there can be"):
        goal = ["--runtime", "llama_cpp", "--device", "cpu", "--max_size", "20MB"]
        said = " ".join(person.bitfoundry("auto", smollm2, *goal, "-o", "small", status=1).split())
        assert re.search(r"smallest result for llama_cpp has \d+\.\d MB", said) and "goal_too_small" in said
        assert not (person.folder / "small").exists()


def test_the_engineer_compares_two_schemes_in_python(
    journey: Journey, stack: LocalStack, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the client: two runs, their verdicts, the layer that hurts, a paired test, the same weights again."""
    person = journey
    monkeypatch.setenv("BITFOUNDRY_HOME", str(stack.home))
    for name in ("BITFOUNDRY_URL", "BITFOUNDRY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with Client() as client:
        with person.step("find the service: Client() without an address"):
            assert client.base_url == stack.url
        unknown = pytest.raises(ApiError, match=r"Unknown preset 'w4a17'.*Did you mean 'w4a16'")
        with person.step("mistake: a preset that is none"), unknown:
            client.submit(smollm2, config="w4a17")
        with person.step("mistake: a broken line in a file of chats"):
            chats = person.folder / "chats.jsonl"
            chats.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n{"messages": [\n')
            with pytest.raises(ApiError, match="Line 2 is not valid JSON"):
                client.datasets.upload(chats)
        with person.step("run two schemes in a loop"):
            little = {"calibration": LITTLE_TEXT, "evaluation": LITTLE_EVALUATION}
            jobs = {
                preset: client.submit(smollm2, config=preset, labels={"exp": "journey"}, **little)  # type: ignore[arg-type]
                for preset in ("int8_weight_only", "w4a16")
            }
            jobs = {preset: client.wait(job.id, timeout_s=JOB_LIMIT_S) for preset, job in jobs.items()}
            assert [job.state for job in jobs.values()] == ["succeeded"] * 2
            assert {job.id for job in client.list(labels={"exp": "journey"})} == {job.id for job in jobs.values()}
        with person.step("read the result: print(job.summary)"):
            text = str(jobs["w4a16"].summary)
            assert jobs["w4a16"].summary and jobs["w4a16"].summary.verdict
            assert len(text) < 1000 and f"{jobs['w4a16'].summary.verdict.level}: " in text and " MB -> " in text
        with person.step("why is it worse: the layer with the largest error of its output"):
            report = client.report(jobs["w4a16"].id)
            worst = max(report["layers"], key=lambda layer: layer["output_error"])
            assert report["summary"]["worst_layer"]["name"] == worst["name"]
            person.use_service(stack.url, stack.api_key)
            assert worst["name"] in person.bitfoundry("explain", jobs["w4a16"].id)
        with person.step("is it worse, on the same tokens"):
            change = client.change(jobs["w4a16"].id, jobs["int8_weight_only"].id)
            assert change.not_tested is None and change.change is not None
            assert change.change.verdict == "worse" and change.change.kl_change.value > 1.0  # 4 bits beside 8
        with person.step("the same weights again, in another number of threads: reproduce.sh"):
            folder = client.download(jobs["int8_weight_only"].id, person.folder / "int8")
            again = subprocess.run(
                ["sh", folder / "reproduce.sh", person.folder / "again"],  # a download has no mode of its own
                env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "2"},
                capture_output=True,
                text=True,
            )
            assert again.returncode == 0, again.stdout + again.stderr
            assert digest(person.folder / "again" / "model.safetensors") == digest(folder / "model.safetensors")


def digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def test_the_mlops_lead_runs_it_for_a_team(journey: Journey, stack: LocalStack, smollm2: Path) -> None:
    """Projects, keys, retries, quotas, webhooks, drain, publishing, sharing, backup: from a shell and over HTTP."""
    person = journey
    person.use_service(stack.url, stack.api_key)
    with person.step("check the service"):
        checks = {check["name"]: check["status"] for check in person.json("doctor")}
        assert checks["service"] == checks["workers"] == "ok"
    with person.step("make a project with a quota, and a key for it"):
        person.bitfoundry("projects", "create", "search", "--max_waiting", "1")
        key = person.json("keys", "create", "pipeline", "--project", "search", "--scope", "jobs:read",
                          "--scope", "jobs:write", "--scope", "admin")["key"]  # fmt: skip
    with person.step("drain the worker"):
        person.bitfoundry("workers", "drain", "last")
    person.use_service(stack.url, key)
    body = {"model": {"path": str(smollm2)}, "config": {"preset": "int8_weight_only"}, "file2file": True}
    with httpx2.Client(base_url=stack.url, headers={"Authorization": f"Bearer {key}"}, trust_env=False) as http:
        with person.step("submit the same request twice"):
            once = {"Idempotency-Key": "nightly"}
            first, second = (http.post("/v1/jobs", json=body, headers=once) for _ in range(2))
            assert first.status_code == 202 and second.json()["id"] == first.json()["id"]
            assert second.headers["Idempotency-Replayed"] == "true"
            other = http.post("/v1/jobs", json=body | {"priority": 9}, headers=once)
            assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
        with person.step("submit more than the quota"):
            refused = http.post("/v1/jobs", json=body)
            assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
            assert "max_waiting: 1 used, 1 allowed" in refused.json()["detail"]
        with person.step("see why the job waits"):
            assert "the only worker is draining" in " ".join(person.bitfoundry("show", "last").split())
        with person.step("get a message at its end, with a signature"), serve() as receiver:
            hook = person.json("webhooks", "create", receiver.url, "--event", "job.succeeded")
            person.bitfoundry("workers", "uncordon", "last", "--api-key", stack.api_key)
            job = person.json("watch", first.json()["id"])
            assert job["state"] == "succeeded"
            (message,) = receiver.wait(1)
            assert message.content["data"]["id"] == job["id"]
            signed = ".".join((message.headers["webhook-id"], message.headers["webhook-timestamp"], ""))
            secret = base64.b64decode(hook["secret"].removeprefix("whsec_"))
            mac = base64.b64encode(hmac.digest(secret, signed.encode() + message.body, "sha256")).decode()
            assert f"v1,{mac}" in message.headers["webhook-signature"].split()
    with person.step("publish it"):
        target = stack.home.parent / "published" / "nightly"
        person.bitfoundry("push", "last", "--to", f"file://{target}", "--wait")
        downloaded = person.folder / "downloaded"
        person.bitfoundry("download", "last", downloaded)
        assert digest(target / "model.safetensors") == digest(downloaded / "model.safetensors")
    with person.step("share its report"):
        said = person.bitfoundry("share", "last")
        link = next(word for word in said.split() if "/v1/shared/" in word)
        assert "works on this machine only" in " ".join(said.split())
        page = httpx2.get(link, headers={"Accept": "text/html"}, trust_env=False)
        assert page.status_code == 200 and "SmolLM2-135M-Instruct" in page.text and str(smollm2) not in page.text
    with person.step("back up, restore, check"):
        there = stack.home.parent / "restored"
        person.bitfoundry("backup", stack.home.parent / "bk.tar", "--home", stack.home)
        key_file = stack.home / "secret.key"
        said = person.bitfoundry("restore", stack.home.parent / "bk.tar", "--home", there, "--key-file", key_file)
        assert f"bitfoundry up --home {there}" in " ".join(said.split())
        checked = person.json("fsck", "--home", there)
        assert checked["num_checked"] > 0 and checked["findings"] == []
        shutil.rmtree(there)


def test_the_manager_decides_whether_to_ship(journey: Journey, stack: LocalStack, smollm2: Path) -> None:
    """Nothing is typed but numbers: from the first page to the sentence that answers, to a link and a phone."""
    person = journey
    key = key_of_project(stack, "managers", "jobs:read", "jobs:write")
    with open_browser() as browser, browser.new_context(base_url=stack.url) as context:
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        expect.set_options(timeout=WAIT_MS)
        with person.step("open the link"):
            page.goto(f"/ui/#key={key}")
            expect(page.get_by_text("No runs yet.")).to_be_visible()
            assert key not in page.url
        with person.step("take the model that is offered"):
            page.get_by_title(str(smollm2), exact=True).click()
            plan = page.get_by_role("region", name="Plan")
            expect(plan.get_by_text("269 MB → 163 MB (−39 %)")).to_be_visible()
            expect(plan.get_by_text("already lie on a grid of few levels: Q4_1")).to_be_visible()
        with person.step("measure on little text, and start"):
            page.get_by_text("More settings").click()
            page.get_by_label("Windows").fill("2")
            page.get_by_label("Questions").fill("1")
            page.get_by_role("button", name="Start job").click()
            expect(page.get_by_role("heading", name="SmolLM2-135M-Instruct int8_weight_only")).to_be_visible()
        with person.step("watch it to its end"):
            state = page.locator("main .state").first
            expect(state).to_have_text("✓ Succeeded", timeout=JOB_LIMIT_S * 1000)
        with person.step("read the answer"):
            result = page.get_by_role("region", name="Result")
            sentence = re.compile(r"of 100 next words, \d+ are the original's|not enough text")
            expect(result.get_by_role("heading").first).to_have_text(sentence)
            expect(result.get_by_role("columnheader")).to_have_text(["Prompt", "Original model", "Quantized model"])
            top = "document.querySelector('[aria-label=Result]').getBoundingClientRect().top"
            assert page.evaluate(f"{top} < window.innerHeight"), "no scrolling to the answer"
        with person.step("send it to a colleague"):
            check_share(page)
        with person.step("look at it on a phone, in the dark"):
            page.set_viewport_size({"width": 390, "height": 844})
            page.emulate_media(color_scheme="dark")
            for place in (page.url, "/ui/", "/ui/models", "/ui/compare"):
                page.goto(place)
                expect(page.get_by_role("heading", level=1)).to_be_visible()
                page.wait_for_load_state("networkidle")
                assert page.evaluate(TOO_WIDE) <= 0, place
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert max(map(int, re.findall(r"\d+", dark)[:3])) < 64, dark


def check_share(page: Page) -> None:
    """Make a link, and read the report as somebody who has nothing but the link."""
    page.get_by_role("button", name="Share").first.click()
    dialog = page.get_by_role("dialog", name="Share this run")
    dialog.get_by_role("button", name="Create link").click()
    link = dialog.get_by_label("New link").locator("code").inner_text()
    expect(dialog.get_by_text("The link works on this machine only")).to_be_visible()
    dialog.get_by_role("button", name="Close").click()
    browser = page.context.browser
    assert browser is not None
    with browser.new_context() as stranger:
        shared = stranger.new_page()
        shared.goto(link)
        expect(shared.get_by_role("heading", level=1)).to_contain_text("SmolLM2-135M-Instruct")
