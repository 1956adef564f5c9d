#!/usr/bin/env bash
# Quantize a model and wait for the result: submit_and_wait.sh MODEL PRESET FOLDER
# The service is that of BITFOUNDRY_URL and BITFOUNDRY_API_KEY, or the one that `bitfoundry up` runs here.
set -euo pipefail

model=$1 preset=$2 folder=$3

# --wait ends with status 1 if the job did not succeed; the reason is in the job that it prints.
job=$(bitfoundry submit "$model" --quant_scheme "$preset" --label from=shell --wait --json)
id=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])' <<< "$job")
bitfoundry download "$id" "$folder"
echo "$id is in $folder"
