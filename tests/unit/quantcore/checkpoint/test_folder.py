"""What a path says of a model: its name, also for a snapshot in the Hub's cache."""

from pathlib import Path

import pytest

from quantcore.checkpoint.folder import model_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/hub/models--org--my-model/snapshots/" + 40 * "a", "org/my-model"),
        ("/hub/models--gpt2/snapshots/" + 40 * "a", "gpt2"),
        ("/models/tiny", "tiny"),
        ("/models/tiny/snapshots/new", "new"),
        ("tiny", "tiny"),
    ],
)
def test_a_snapshot_is_named_after_its_model(path: str, name: str) -> None:
    assert model_name(Path(path)) == name
