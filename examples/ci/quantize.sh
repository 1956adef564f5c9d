#!/usr/bin/env bash
# What the CI job runs: check the plan first, it costs nothing; then the job itself, its log in ours.
# Takes MODEL and CONFIG (a preset's name or a JSON file) from the environment.
set -euo pipefail

bitfoundry plan "$MODEL" --quant_scheme "$CONFIG"
id=$(bitfoundry submit "$MODEL" --quant_scheme "$CONFIG" --label "commit=${GITHUB_SHA:-none}" --max_runtime_s 7200 --json |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])')
trap 'bitfoundry cancel "$id" > /dev/null || true' INT TERM # a cancelled workflow cancels its job
bitfoundry logs "$id" --follow --level info
job=$(bitfoundry show "$id" --json)
python3 - "$job" <<'PYTHON'
import json
import os
import sys

job = json.loads(sys.argv[1])
line = f"{job['id']} {job['state']}: {job['error'] or job['summary']}"
print(line)
if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
    with open(summary, "a") as file:
        file.write(f"{line}\n")
sys.exit(job["state"] != "succeeded")
PYTHON
