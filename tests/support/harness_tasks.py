"""Tasks of lm-evaluation-harness that need no network."""

import json
from pathlib import Path

TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: bits_per_byte}}
metadata: {{version: 1.0}}
"""


def write_tasks(folder: Path) -> Path:
    """Write two tasks that need no network: ``tiny_choice`` and ``tiny_rolling``. Return their folder."""
    words = "for if while class return import from def".split()
    rows = [
        {"question": f"The {word} statement", "choices": [f" {other} it" for other in words], "answer": number}
        for number, word in enumerate(words)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "choice.yaml").write_text(TASK.format(data=folder / "rows.jsonl"))
    (folder / "rolling.yaml").write_text(ROLLING.format(data=folder / "rows.jsonl"))
    return folder
