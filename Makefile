# `make help` lists the targets. Everything runs in .venv, made by the first target that needs it.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# The folder kernels/ must not shadow the package `kernels` that transformers imports.
export PYTHONSAFEPATH := 1
export TOKENIZERS_PARALLELISM := false
export WANDB_MODE ?= offline

$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV): a few minutes"
	$(VENV)/bin/pip install -r requirements.lock
	$(VENV)/bin/pip install --quiet --no-deps -e .
	touch $@

.PHONY: help setup quickstart test test-slow test-gpu check format types golden bench wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## make .venv with pinned packages and draftwood in it

quickstart: setup  ## the main job on real weights and data: distil a draft, measure it, decode with it
	$(PY) scripts/run_quickstart.py

test: setup  ## the fast tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto -m "not slow and not gpu"

test-slow: setup  ## the tests that take minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "slow and not gpu"

test-gpu: setup  ## the tests that need a GPU
	$(PY) -m pytest -q -m gpu

check: setup types  ## ruff, formatting, type checker
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -p draftwood
	$(VENV)/bin/mypy scripts

format: setup  ## let ruff format and fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types:  ## the tree of links that type checkers read the package from
	@rm -rf build/types && mkdir -p build/types/draftwood
	@for folder in configs decode kernels models train; do ln -s ../../../$$folder build/types/draftwood/$$folder; done
	@for file in draftwood/*.py draftwood/py.typed; do ln -s ../../../$$file build/types/draftwood/; done

golden: setup  ## write the golden losses anew
	OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/train/test_golden.py --write-golden

bench: setup  ## what a decode step costs on this machine, as a table
	$(VENV)/bin/draftwood benchmark verify

wheel: setup  ## build the wheel into dist/
	rm -rf build/lib dist && $(VENV)/bin/pip wheel --quiet --no-deps -w dist .

clean:  ## remove build products; .venv, runs and the cache stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
