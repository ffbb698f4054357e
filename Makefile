# Two commands do everything: `make rehearse` and `make test`. The rest is for people who change the code.
VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: help env env-dev rehearse test lint bench soak chaos wheels clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

env:
	@scripts/make-env $(VENV) run

env-dev:
	@scripts/make-env $(VENV) dev

rehearse: env ## the whole job on this machine: production, two HOLDs, comparison, admission, receipts
	@$(VENV)/bin/coordinator rehearse $(ARGS)

test: env-dev ## lint and every test lane this machine can run
	@scripts/install-debian-packages
	@scripts/unpack-docker
	@PY=$(PY) scripts/run-tests

lint: env-dev ## ruff, mypy strict, import-linter
	@PY=$(PY) scripts/run-lint

bench: env-dev ## CPU benchmarks against named peers; table and build/bench.json
	@$(PY) -m benchmarks

soak: env-dev ## long seeded proofs, resumable
	@$(PY) scripts/soak.py $(ARGS)

chaos: env-dev ## seeded random fault schedules on real hosts, resumable (root only)
	@$(PY) scripts/chaos.py $(ARGS)

wheels: env-dev ## the two wheels into dist/
	@$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist . packaging/remote-dspark

clean: ## removes what was built, never receipts
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
