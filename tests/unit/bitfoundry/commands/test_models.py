"""What people see of models and their results: tables that fit a plain terminal, with whole ids and addresses."""

import pytest

from bitfoundry.client.model_answers import (
    BriefResult,
    ModelFolder,
    ModelFolders,
    ModelResults,
    ParentResult,
    Recipe,
    Result,
    UsedModel,
)
from bitfoundry.commands import models
from tests.support.terminals import shown

ID = f"job_{'0123456789abcdef' * 2}"
MODEL = "/srv/models/of-the-team/Meta-Llama-3.1-8B-Instruct-with-a-very-long-name-of-its-own"
URL = "https://huggingface.co/organization/Meta-Llama-3.1-8B-Instruct-w4a16-gptq"
CHILD = f"/data/artifacts/{ID}/{'f' * 64}/quark"
RESULT = Result.model_validate(
    {
        "job_id": ID, "name": "meta-llama-3.1-8b-instruct-w4a16-gptq-of-the-night",
        "finished_at": "2026-11-21T12:00:00.123456Z",
        "recipe": {"preset": "int8_dynamic_per_channel", "algorithms": ["smooth", "gptaq"]},
        "size_before_bytes": 140_000_000_000, "size_after_bytes": 35_000_000_000, "verdict": "faithful",
        "kl_mean": 0.000123456, "kl_stderr": 0.0001234, "publication": {"state": "published", "url": URL},
        "derived_models": [CHILD],
    }
)  # fmt: skip


def unfolded(text: str, start: int, end: int | None = None) -> str:
    """Return a column of a table without blanks, so that what was folded is whole again."""
    return "".join("".join(line[start:end].split()) for line in text.splitlines())


def test_results_fit_80_characters_with_whole_ids() -> None:
    parent = ParentResult(job_id=ID, model="/m")
    text = shown(models.results_details(ModelResults(model=MODEL, derived_from=parent, data=[RESULT, RESULT])))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    column = next(line for line in lines if line.startswith("recipe")).index("job")
    assert unfolded(text, column).count(ID + "2026-11-21T12:00meta-llam…he-night" + URL + "became" + CHILD) == 2
    for whole in ("35,000.0 MB (25 %)", "0.00012 (0.0000 to 0.0004)", "faithful", "int8_dynami…th + gptaq"):
        assert text.count(whole) == 2, whole
    assert f"derived from  /m, by {ID}" in text


def test_models_fit_80_characters() -> None:
    used = UsedModel(name=MODEL, num_jobs=5000, num_results=4321, active_at="2026-11-21T12:00:00Z", best=RESULT)
    text = shown(models.models_table([used, used.model_copy(update={"name": "org/name", "best": None})]))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert f"{MODEL}2026-11-21T12:00:00org/name" in unfolded(text, 0, lines[0].index("jobs"))
    for whole in ("35,000.0 MB (25 %), faithful", "none measured"):
        assert whole in text, whole


def test_models_on_the_server_are_listed_with_their_sizes() -> None:
    found = ModelFolders(
        data=[ModelFolder(path="/models/tiny", size_bytes=269_060_552, is_result=False)], is_complete=True
    )
    text = shown(models.folders_details(found))
    assert "/models/tiny" in text and "269.1 MB" in text and "more models" not in text
    assert "there may be more models" in shown(models.folders_details(found.model_copy(update={"is_complete": False})))
    assert "No model was found" in shown(models.folders_details(found.model_copy(update={"data": []})))


def test_a_model_without_results_says_so() -> None:
    assert "has succeeded yet" in shown(models.results_details(ModelResults(model="/m", data=[])))


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ({"preset": "w4a16", "algorithms": ["gptq"]}, "w4a16 + gptq"),
        ({"algorithms": []}, "custom"),
        ({"mix": {"schemes": ["w4a16", "keep"]}, "algorithms": []}, "mix of w4a16, keep"),
        ({"goal": {"runtime": "vllm", "device": "24GB"}}, "auto for vllm on 24GB"),
    ],
)
def test_recipes_in_words(recipe: dict[str, object], text: str) -> None:
    assert models.recipe_text(Recipe.model_validate(recipe)) == text


def test_what_was_not_measured_is_left_out() -> None:
    bare = BriefResult(job_id=ID, finished_at="2026-11-21T12:00:00Z", recipe=Recipe(preset="fp8"))
    result = Result(**bare.model_dump())
    lines = shown(models.results_details(ModelResults(model="/m", data=[result]))).splitlines()
    assert lines[-2].split() == ["fp8", "not", "measured", ID]
    assert lines[-1].split() == ["2026-11-21T12:00"]
