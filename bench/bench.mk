# Included by the Makefile. The environment of the system that is measured beside rlhpc, apart from rlhpc's own.
BENCH_VENV ?= .venv-bench

.PHONY: bench-env

bench-env: $(BENCH_VENV)/.installed

$(BENCH_VENV)/.installed: bench/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet install -r bench/requirements.txt
	touch $@

.PHONY: bench-reshard-plan bench-reshard

# Ten minutes; the loopback device and both cores must be free.
bench-reshard: venv
	$(BIN)/python -m bench.reshard

# One process, no torch: a minute.
bench-reshard-plan: venv
	$(BIN)/python -m bench.reshard_plan

.PHONY: bench-convert

# A model of 4 GB three times each way: 13 GB of disk, 10 GB of memory, some minutes on a quick disk.
bench-convert: venv
	$(BIN)/python -m bench.convert
