"""A pipeline: try several presets, keep the smallest model whose perplexity has hardly grown.

python examples/pipeline.py MODEL FOLDER
"""

import asyncio
import os
import sys
from pathlib import Path

from bitfoundry.client import AsyncClient, Job

PRESETS = ("fp8", "int8_dynamic", "w4a16")
MAX_GROWTH = 1.05


async def quantize(client: AsyncClient, model: str, preset: str) -> Job:
    job = await client.submit(model, config=preset, labels={"from": "pipeline"})
    async for event in client.stream_events(job.id):
        if event.kind == "phase_started":
            print(f"{preset}: {event.data['phase']}", file=sys.stderr)
    return await client.get(job.id)


def growth(job: Job) -> float:
    """Return perplexity after over perplexity before; 1 if the service has not evaluated the model."""
    return (job.summary and job.summary.perplexity_ratio) or 1.0


async def main(model: str, folder: Path) -> int:
    async with AsyncClient(os.environ["BITFOUNDRY_URL"], os.environ["BITFOUNDRY_API_KEY"]) as client:
        jobs = await asyncio.gather(*(quantize(client, model, preset) for preset in PRESETS))
        good = [job for job in jobs if job.state == "succeeded" and growth(job) <= MAX_GROWTH]
        if not good:
            print("no preset is good enough", file=sys.stderr)
            return 1
        best = min(good, key=lambda job: job.summary.size_after_bytes if job.summary else 0)
        await client.download(best.id, folder)
        print(f"{best.preset} is in {folder}")
        return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], Path(sys.argv[2]))))
