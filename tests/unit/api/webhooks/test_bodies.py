"""What each kind of receiver gets, with the formats as Slack and Microsoft document them."""

import datetime as dt
import json
from typing import Any

import pytest

from api.store.accounts import webhooks
from api.store.accounts.webhooks import Message
from api.webhooks.bodies import MAX_TEXT_LENGTH, body_of

JOB = "job_" + "a" * 32
AT = dt.datetime(2026, 11, 22, 8, tzinfo=dt.UTC)
URL = "https://bitfoundry.example.org"
DATA: dict[str, Any] = {"id": JOB, "name": "nightly", "labels": {}, "model": "/models/tiny", "state": "succeeded"}
GOOD = {"verdict": "good", "verdict_reason": "KL divergence 0.01, 0.05 is allowed"}
FORGED = "<!channel> & <https://evil.example|click> [x](https://evil.example) **b** ![i](u) <at>all</at> :bomb:"


def sent(form: str, event_type: str = "job.succeeded", url: str | None = URL, **data: Any) -> dict[str, Any]:
    message = Message("msg_1", "whk_1", "prj_1", "https://x/", form, b"", event_type, AT, DATA | data)
    content: dict[str, Any] = json.loads(body_of(message, url))
    return content


def card_of(content: dict[str, Any]) -> dict[str, Any]:
    [attachment] = content["attachments"]
    assert (content["type"], attachment["contentType"]) == ("message", "application/vnd.microsoft.card.adaptive")
    card: dict[str, Any] = attachment["content"]
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    return card


def lines_of(card: dict[str, Any]) -> list[str]:
    """The lines of a card, all of whose texts are runs: of no other element would Teams show Markdown as it is."""
    assert {block["type"] for block in card["body"]} == {"RichTextBlock"}
    assert {run["type"] for block in card["body"] for run in block["inlines"]} == {"TextRun"}
    return ["".join(run["text"] for run in block["inlines"]) for block in card["body"]]


def test_json_is_the_event_as_it_is_stored() -> None:
    assert sent("json") == {"type": "job.succeeded", "timestamp": "2026-11-22T08:00:00+00:00", "data": DATA}


def test_slack_gets_text_and_blocks() -> None:
    content = sent("slack", **GOOD)
    assert content["text"] == "✓ nightly: succeeded"
    texts = [block["text"] for block in content["blocks"]]
    assert {block["type"] for block in content["blocks"]} == {"section"}
    assert [text["text"] for text in texts] == [
        "✓ nightly: succeeded", "Model: tiny", "Verdict: good: KL divergence 0.01, 0.05 is allowed",
        f"<{URL}/ui/jobs/{JOB}|Open the run>",
    ]  # fmt: skip
    assert [text["type"] for text in texts] == ["plain_text"] * 3 + ["mrkdwn"]
    assert (content["unfurl_links"], content["unfurl_media"]) == (False, False)


def test_a_missed_goal_stands_beside_the_verdict() -> None:
    texts = [block["text"]["text"] for block in sent("slack", **GOOD, goal_missed="nothing keeps 97 %")["blocks"]]
    assert texts[2:4] == ["Verdict: good: KL divergence 0.01, 0.05 is allowed", "Goal missed: nothing keeps 97 %"]


def test_teams_gets_an_adaptive_card() -> None:
    card = card_of(sent("teams", **GOOD))
    assert lines_of(card) == [
        "✓ nightly: succeeded", "Model: tiny", "Verdict: good: KL divergence 0.01, 0.05 is allowed",
    ]  # fmt: skip
    assert card["actions"] == [{"type": "Action.OpenUrl", "title": "Open the run", "url": f"{URL}/ui/jobs/{JOB}"}]


def test_without_a_public_address_there_is_no_link() -> None:
    assert len(sent("slack", url=None)["blocks"]) == 2
    assert "actions" not in card_of(sent("teams", url=None))


def test_a_failure_says_what_to_do() -> None:
    error = {"code": "hub_gated", "message": "The model is gated.", "hint": "Accept its licence."}
    for content in (
        lines_of(card_of(sent("teams", "job.failed", error=error))),
        [block["text"]["text"] for block in sent("slack", "job.failed", error=error, url=None)["blocks"]],
    ):
        assert content == [
            "✕ nightly: failed", "Model: tiny", "Error: The model is gated.", "What to do: Accept its licence.",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("event_type", "title"),
    [
        ("job.retry_wait", "nightly: waiting to retry"),
        ("job.published", "✓ nightly: published"),
        ("job.publish_failed", "✕ nightly: could not be published"),
    ],
)
def test_titles(event_type: str, title: str) -> None:
    assert sent("slack", event_type)["text"] == title


def test_a_test_message_names_no_job() -> None:
    data = {"webhook_id": "whk_1"}
    message = Message("msg_1", "whk_1", "prj_1", "https://x/", "slack", b"", webhooks.TEST, AT, data)
    content = json.loads(body_of(message, URL))
    assert content["text"] == "Test message from Bitfoundry" and len(content["blocks"]) == 1


def test_names_of_others_mention_and_link_nothing() -> None:
    """Slack shows `&lt;` as `<`; Teams formats no run."""
    slack = sent("slack", name=FORGED, url=None)
    escaped = FORGED.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert slack["text"] == f"✓ {escaped}: succeeded" == slack["blocks"][0]["text"]["text"]
    assert all(block["text"]["type"] == "plain_text" and not block["text"]["emoji"] for block in slack["blocks"])
    assert lines_of(card_of(sent("teams", name=FORGED)))[0] == f"✓ {FORGED}: succeeded"


def test_a_run_without_a_name_is_called_after_its_model() -> None:
    assert sent("slack", name=None, model="org/model")["text"] == "✓ org/model: succeeded"
    result = f"/data/artifacts/{JOB}/{'0' * 64}/quark"
    assert sent("slack", name=None, model=result)["text"] == f"✓ result of {JOB}: succeeded"


def test_long_texts_fit() -> None:
    """A section of Slack's takes 3000 characters, a message to Teams 28 KB."""
    error = {"message": "<" * 30_000, "hint": "é" * 30_000}
    slack = sent("slack", "job.failed", name="&" * 200, error=error)
    assert max(len(block["text"]["text"]) for block in slack["blocks"]) < 3000
    teams = sent("teams", "job.failed", name="&" * 200, error=error)
    assert len(json.dumps(teams)) < 28_000
    assert max(map(len, lines_of(card_of(teams)))) <= MAX_TEXT_LENGTH + len("What to do: ")


def test_what_waits_since_before_an_upgrade_is_sent_too() -> None:
    old = {"id": JOB, "name": None, "labels": {}, "state": "queued"}
    message = Message("msg_1", "whk_1", "prj_1", "https://x/", "teams", b"", "job.queued", AT, old)
    assert lines_of(card_of(json.loads(body_of(message, None)))) == [f"{JOB}: queued"]


def test_an_event_of_the_registry_says_what_moves_and_why() -> None:
    moved = {"model": "support-bot", "alias": "production", "from_version": 2, "version": 3, "by": "Ada"}
    content = sent("slack", "model.alias_requested", reason="<!channel> better", **moved)
    assert [block["text"]["text"] for block in content["blocks"]] == [
        "support-bot@production: approval requested", "Version: 2 → 3", "Reason: &lt;!channel&gt; better",
        "By: Ada", f"<{URL}/ui/registry?name=support-bot|Open the registry>",
    ]  # fmt: skip
    added = card_of(sent("teams", "model.version_added", model="support-bot", version=3, by=None))
    assert lines_of(added) == ["support-bot@3: new version"]
    assert added["actions"][0]["title"] == "Open the registry"
