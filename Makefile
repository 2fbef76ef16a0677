# `make help` lists the targets. Python 3.11 or newer and make are all that is needed.

PYTHON ?= python3
VENV ?= .venv
SOAK ?= 1800
DATABASE ?= postgresql
BIN := $(VENV)/bin
# Each of the processes that tests start would compile the sources anew without bytecode.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help up test test-long test-gpu check format soak soak-ledger mutations bench bench-llm bench-diffusion bench-audio bench-mixed docs console-pictures clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 17

up: $(VENV)/installed ## install, then run gateway, worker and queue in the foreground
	@exec $(BIN)/tollgate up

test: $(VENV)/installed-test ## run all tests
	$(PYTEST) -n auto --dist worksteal

test-long: $(VENV)/installed-test ## run the tests that take long and seldom find anything new
	$(PYTEST) -n auto --dist worksteal -m long

test-gpu: $(VENV)/installed-test ## run the tests that need a CUDA device
	$(PYTEST) -m gpu tests/workers/gpu

check: $(VENV)/installed-test ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-test ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(VENV)/installed-test ## break everything under live traffic for SOAK seconds; DATABASE=sqlite
	$(BIN)/python -m tests.soak --seconds $(SOAK) --database $(DATABASE)

soak-ledger: $(VENV)/installed-test ## try the ledger against its model for SOAK seconds, with new choices
	TOLLGATE_SOAK=$(SOAK) $(PYTEST) -n 2 tests/ledger/test_model.py

mutations: $(VENV)/installed-test ## put mistakes into the money path; tests must notice each
	$(BIN)/python -m tests.mutations

bench: $(VENV)/installed-test ## measure on this machine, beside an earlier version and other proxies
	$(BIN)/python -m benchmarks

bench-llm: $(VENV)/installed-test ## measure the language engine beside others
	$(PIP) -e '.[peers]'
	$(BIN)/python -m benchmarks llm

bench-diffusion: $(VENV)/installed-test ## measure the diffusion engine beside others; ARGS=--gpu
	$(BIN)/python -m benchmarks.diffusion $(ARGS)

bench-audio: $(VENV)/installed-test ## measure the speech engine beside its model, one by one
	$(BIN)/python -m benchmarks.audio $(ARGS)

bench-mixed: $(VENV)/installed-test ## all kinds of requests on one device, with a catalog larger than memory
	$(BIN)/python -m benchmarks.mixed $(ARGS)

docs: $(VENV)/installed-test ## write the generated parts of the documentation
	$(BIN)/python -m docs.generate

console-pictures: $(VENV)/installed-test ## renew the console's pictures: of its tests, then of docs/img from a running demo
	TOLLGATE_TEST_PICTURES=renew $(PYTEST) tests/console/browser/test_looks.py
	$(BIN)/python -m docs.console_pictures

clean: ## remove the virtual environment and caches; state in .tollgate/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Tollgate needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# torch goes first and by itself, so that nothing else decides which build of it is taken.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing; this takes a few minutes the first time"
	$(PIP) torch
	$(PIP) -e '.[gateway,worker,embedded]'
	@touch $@

$(VENV)/installed-test: $(VENV)/installed pyproject.toml constraints.txt
	$(PIP) -e '.[gateway,worker,embedded,test,check]'
	@touch $@
