"""Words for people about measurements."""

import pytest

from quantcore.report.quality import metric_title


@pytest.mark.parametrize(
    ("metric", "title"),
    [("acc,none", "acc"), ("exact_match,strict-match", "exact_match (strict-match)"), ("bleu", "bleu")],
)
def test_a_metric_has_a_title(metric: str, title: str) -> None:
    assert metric_title(metric) == title
