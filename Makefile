# The two commands of the README. Each sets up its own .venv first; nothing else is touched.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
SEEDS ?= 0
SCALE ?= cpu

.PHONY: help demo reproduce test lint docs bench soak long-test deploy-test clean
.DEFAULT_GOAL := help

help:
	@echo "make demo           FedAvg and FedDF on embedded digits, side by side (about a minute; SEEDS=0,1,2 for three)"
	@echo "make reproduce      a table or figure of the paper: ARTIFACT=table1 SCALE=smoke SEEDS=0,1,2; without ARTIFACT it lists them"
	@echo "make test           ruff, mypy, import-linter, the documentation site and pytest"
	@echo "make docs           the documentation site, in site/"
	@echo "make soak           200 kills, a million mutated inputs, 50 rounds with failures; writes docs/reliability.md (about 40 minutes)"
	@echo "make long-test      the long forms of the tests: many kills, Ray, Flower's simulation, compiled steps"
	@echo "make bench          the speed tables (70 minutes on a quiet machine; ONLY=local for one part)"
	@echo "make deploy-test    a real Flower deployment on this machine: TLS, registered keys, accidents, intruders, a revocation (5 to 10 minutes)"
	@echo "make clean          remove .venv and caches"

.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11, 4) else "feddf needs Python 3.11.4 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

.venv/dev: .venv/demo
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt byzfl
	@touch $@

demo: .venv/demo
	$(BIN)/feddf compare demo --seeds $(SEEDS)

reproduce: .venv/demo
	$(BIN)/python -m reproduction $(if $(ARTIFACT),$(ARTIFACT) --scale $(SCALE) --seeds $(SEEDS),--list)

.venv/docs: .venv/demo
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: .venv/docs
	$(BIN)/zensical build --strict --clean

soak: .venv/dev
	$(BIN)/python benchmarks/soak.py --write

long-test: .venv/dev
	FEDDF_SOAK=1 $(BIN)/pytest

bench: .venv/demo
	$(BIN)/python benchmarks/bench.py $(ONLY)

deploy-test: .venv/dev
	$(BIN)/python examples/flower-deployment/deploy.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/zensical build --strict --clean

# Lint uses the time in which tests wait; what it says is printed after theirs.
test: .venv/dev
	@$(MAKE) --no-print-directory lint > .venv/lint.log 2>&1 & lint=$$!; \
	$(BIN)/pytest; tests=$$?; wait $$lint; linted=$$?; cat .venv/lint.log; test $$tests = 0 -a $$linted = 0

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
