"""A task for a scheduler such as Airflow: it may be killed and run again at any time, and still makes one job.

The scheduler's own id of the run is the Idempotency-Key, so a second attempt finds the job of the first. In a DAG:

    @task(retries=3)
    def quantize(model: str, **context) -> str:
        return airflow_task.quantize(model, "fp8", run_id=context["run_id"])
"""

import os

from bitfoundry.client import Client
from bitfoundry.errors import BitfoundryError


class QuantizationFailed(Exception):
    """A failure that a retry cannot help: raise AirflowFailException from it."""


def quantize(model: str, preset: str, *, run_id: str, timeout_s: float = 6 * 3600) -> str:
    """Quantize a model and return the job's id. Raises QuantizationFailed, or BitfoundryError if a retry may help."""
    with Client(os.environ["BITFOUNDRY_URL"], os.environ["BITFOUNDRY_API_KEY"]) as client:
        job = client.submit(model, config=preset, name=run_id, idempotency_key=f"airflow {run_id}")
        job = client.wait(job.id, timeout_s=timeout_s, poll_s=5)
    if job.state == "succeeded":
        return job.id
    reason = f"{job.id} is {job.state}: {job.error.message if job.error else 'somebody ended it'}"
    if job.error and job.error.retryable:
        raise BitfoundryError(reason, hint=job.error.hint)
    raise QuantizationFailed(reason)
