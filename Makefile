# A fresh clone needs Python 3.10 or newer and make, nothing else. `make` alone says what there is.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test gpu-test lint format bench docs clean

help: ## this list
	@echo "Quire: paged attention that explains itself."
	@echo
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile
	@echo
	@echo "  The first of them makes $(VENV) from constraints.txt. Another Python: make demo PYTHON=python3.12"

demo: $(READY) ## a small continuous-batching decoder on this machine, then the proof that it was right
	@$(BIN)/quire demo

test: $(READY) ## the whole test suite, on the CPU
	@$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist worksteal

# On a GPU machine torch is there already: no environment is made, $(PYTHON) is used as it is.
gpu-test: ## the operator on this machine's GPU, against the reference; needs torch, triton, numpy and pytest
	@PYTHONPATH=src $(PYTHON) tests/gpu/run.py $(if $(REPORTS),--reports $(REPORTS))

lint: $(READY) ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY) ## let ruff write what `make lint` asks for
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY) ## measure the CPU kernels against their baselines
	@$(BIN)/quire bench --device cpu

docs: $(READY) ## print docs/contract.md from the rules, docs/kernels.md from the kernels: these are compiled for every card, minutes
	@$(BIN)/python -m quire.contract > docs/contract.md.new && mv docs/contract.md.new docs/contract.md
	@$(BIN)/python -m quire.kernels.triton > docs/kernels.md.new && mv docs/kernels.md.new docs/kernels.md

clean: ## remove the environment and everything that was generated
	rm -rf $(VENV) build dist src/*.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache docs/*.md.new
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools comes first and builds Quire itself: an isolated build would fetch one that constraints.txt does not pin.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no '$(PYTHON)' here; name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: $$($(PYTHON) --version) is too old, Quire needs 3.10 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: this $(PYTHON) cannot make virtual environments: its module ensurepip or venv is missing." >&2; \
	  echo "      On Debian and Ubuntu it is in the package python3-venv." >&2; exit 1; }
	@echo "Installing torch, triton and the tools into $(VENV). This happens once and takes a minute or a few."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[test,lint]'
	@touch $@
