# Every target first brings up .venv from requirements.lock. Needs Python 3.11+ and make, nothing else;
# works offline once set up. `make help` lists the targets.
PYTHON ?= python3
UV_VERSION := 0.13.7
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOWEST := .venv-lowest
# Without bytecode files every process that the tests start compiles torch again, which takes 2 seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-lowest coverage lint format bench docs wheel lock clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## Create .venv with everything pinned

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("sandmask needs Python 3.11 to 3.14; found " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 setup") if not (3, 11) <= sys.version_info[:2] <= (3, 14) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $(READY)

demo: $(READY)  ## Train on the built-in Spirals data; prints a table, draws a picture
	$(BIN)/sandmask demo

test: $(READY)  ## Run the test suite
	$(BIN)/python -m pytest -q -n auto

coverage: $(READY)  ## Measure test coverage; prints a table, writes htmlcov/
	$(BIN)/python -m pytest -q -n auto --cov --cov-report=term:skip-covered --cov-report=html

# Left out: what needs the export extra (a newer torch), the pages and examples (packages of the dev extra), and the time that
# old versions of torch take to start. Old packages give warnings together with newer ones that they depend on.
test-lowest: $(LOWEST)/.ready  ## Run the tests with the oldest supported packages, in an environment of its own
	$(LOWEST)/bin/python -m pytest -q -n auto -W ignore::DeprecationWarning -W ignore::FutureWarning \
	  $(addprefix --ignore=tests/,cli/test_cli_export.py test_docs.py test_examples.py test_figures.py) \
	  --deselect tests/test_import.py::test_the_first_step_of_a_run_loads_no_compiler

$(LOWEST)/.ready: pyproject.toml $(READY)
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
	  --editable '.[vision,report,ray,slurm,optuna,tensorboard,wandb,mlflow,huggingface]'
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python pytest pytest-xdist hypothesis
	@touch $@

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## Let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Measure every speed claim that this machine can
	$(BIN)/python -m benchmarks

docs: $(READY)  ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(READY)  ## Build the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

lock: $(READY)  ## Resolve requirements.lock anew from pyproject.toml and constraints.txt
	$(BIN)/uv pip compile --quiet --upgrade --all-extras --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --no-header --constraint constraints.txt \
	  --output-file requirements.lock pyproject.toml

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) $(LOWEST) dist site build htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache
