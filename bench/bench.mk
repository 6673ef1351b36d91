# Included by the Makefile. TRL, the peer, has its own environment.
BENCH_VENV ?= .venv-bench

.PHONY: bench-env

bench-env: $(BENCH_VENV)/.installed

$(BENCH_VENV)/.installed: bench/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet install -r bench/requirements.txt
	touch $@

.PHONY: bench-reshard-plan bench-reshard

# Ten minutes. The loopback device and both cores must be idle.
bench-reshard: venv
	$(BIN)/python -m bench.reshard

# A minute: one process, no torch.
bench-reshard-plan: venv
	$(BIN)/python -m bench.reshard_plan

.PHONY: bench-schedules

# A minute: one process, no torch.
bench-schedules: venv
	$(BIN)/python -m bench.schedules

.PHONY: bench-layers

# Two minutes, 12 GB of memory: operators and bytes of full-size layers.
bench-layers: venv
	$(BIN)/python -m bench.layer_cost

.PHONY: bench-convert

# Ten minutes on a fast and otherwise idle disk: a model of 4 GB five times in each direction, by one and two workers, with a warm and a
# cold cache, beside copies and plain writes; 13 GB of disk. The import of torch is timed beside them.
bench-convert: venv
	$(BIN)/python -m bench.convert

.PHONY: bench-speculative bench-claims

# Ten minutes: an engine with guesses and without, where they are right and where none is.
bench-speculative: venv
	$(BIN)/python -m bench.speculative

# Fifteen minutes on idle cores: what is published for verl, measured here; docs/measurements/claims.md has the results.
bench-claims: venv
	$(BIN)/python -m bench.claims

.PHONY: bench-sandbox hostile

# Half a minute: CPU time of programs in responses.
bench-sandbox: venv
	$(BIN)/python -m bench.sandbox

# A few minutes, as root: hostile programs in every setting of the sandbox.
hostile: venv
	$(BIN)/python -m tests.rewards.hostile

.PHONY: bench-monitoring bench-rank-start

# As root, a few minutes: file opens of 64 ranks and their supervisor on a test cluster, the store's CPU time with 1,024 clients.
bench-monitoring: venv
	$(BIN)/python -m bench.monitoring

# As root, ten minutes, 10 GB of disk: opens and stats of a rank's start, without and with an archive of its environment.
bench-rank-start: venv
	$(BIN)/python -m bench.rank_start

.PHONY: hostile-conversion

# Five minutes: conversions that are killed, and results that are damaged.
hostile-conversion: venv
	$(BIN)/python -m tests.convert.hostile
