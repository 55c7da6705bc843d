# A fresh clone needs Python 3.10 or newer and make, nothing else. `make` alone says what there is.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
export QUIRE_PROJECT_URL

# constraints-torch-2.15.txt makes .venv-torch-2.15: environments of different versions stay beside each other.
VENV := .venv$(patsubst constraints%.txt,%,$(notdir $(CONSTRAINTS)))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := src/quire/kernels/native
BUILT := $(VENV)/.built
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help demo test gpu-test clients versions sanitize emulate lint format bench docs figures site dist project-url clean

help: ## show this list
	@echo "Quire: paged attention that explains itself."
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done
	@echo
	@echo "The first of them makes $(VENV) from $(CONSTRAINTS)."
	@echo "Another Python:            make demo PYTHON=python3.12"
	@echo "Another torch and Triton:  make test CONSTRAINTS=constraints-torch-2.15.txt"

demo: $(BUILT) ## run a small decoder on a paged cache, and verify its results
	@$(BIN)/quire demo

test: $(BUILT) ## run the whole test suite on the CPU
	@$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist worksteal

# On a GPU machine torch is there already: no environment is made, $(PYTHON) is used as it is. It needs torch, triton, numpy, pytest.
gpu-test: ## test the operator on this machine's GPU
	@PYTHONPATH=src $(PYTHON) tests/gpu/run.py $(if $(REPORTS),--reports $(REPORTS))

# CLIENTS="vllm transformers" tests these alone. Every client has its own environment, .venv-NAME, from tests/clients/NAME.txt.
clients: ## test Quire in vLLM, transformers, ...: half an hour or more
	@$(PYTHON) tests/clients/run.py $(CLIENTS)

versions: $(READY) ## compile the GPU kernels with Triton 3.6 to 3.9: minutes
	@$(BIN)/python tests/versions/run.py

# The whole package again, with the native kernels watched; torch itself is not, so leaks at exit are not looked for.
SANITIZED := build/sanitized
sanitize: $(READY) ## test the native CPU kernels with sanitizers: minutes
	@QUIRE_CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" \
	  $(BIN)/python setup.py -q build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	@LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  PYTHONPATH=$(SANITIZED)/lib $(BIN)/python -m pytest -q -p no:cacheprovider tests/kernels/native/test_native.py \
	  tests/test_attend.py tests/test_dont_care.py tests/test_invariance.py tests/test_write.py -k "not openmp and not torch"

emulate: $(BUILT) ## test the native CPU kernels on other CPUs, under qemu-user
	@$(BIN)/python -m pytest -q tests/kernels/native/test_emulated.py
	@command -v aarch64-linux-gnu-g++ qemu-aarch64 >/dev/null || { \
	  echo "make: ARM needs Debian's packages g++-aarch64-linux-gnu and qemu-user" >&2; exit 1; }
	@mkdir -p build/arm
	@for part in kernels library probe; do \
	  aarch64-linux-gnu-g++ -std=c++17 -O3 -fPIC -DQUIRE_LEVEL=neon -c $(NATIVE)/$$part.cpp -o build/arm/$$part.o || exit 1; done
	@aarch64-linux-gnu-g++ -shared build/arm/*.o -o build/arm/libquire.so -ldl -lpthread
	@aarch64-linux-gnu-g++ -std=c++17 -O1 -I$(NATIVE) tests/kernels/native/driver.cpp -o build/arm/driver -ldl
	@qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm/driver build/arm/libquire.so

lint: $(READY) ## run ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY) ## let ruff make the changes that `make lint` asks for
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(BUILT) ## measure the CPU kernels against their baselines
	@$(BIN)/quire bench --device cpu

docs: $(READY) versions ## generate docs/contract.md, faults.md and kernels.md: minutes
	@$(BIN)/python -m quire.contract > docs/contract.md.new && mv docs/contract.md.new docs/contract.md
	@$(BIN)/python -m quire.conformance > docs/faults.md.new && mv docs/faults.md.new docs/faults.md
	@$(BIN)/python -m quire.kernels.triton build/versions.json > docs/kernels.md.new && mv docs/kernels.md.new docs/kernels.md

figures: $(READY) ## draw docs/figures from docs/performance.md and docs/data
	@PYTHONPATH=src $(BIN)/python tools/figures

site: $(READY) ## build the documentation site in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The site is build/site/index.html. With its search: python3 -m http.server --directory build/site"

# Without an address a package index would show a page without links.
dist: project-url $(READY) ## build a release in dist/: source distribution and wheel
	@$(BIN)/python setup.py -q sdist -d dist bdist_wheel -d dist
	@ls dist

project-url:
	@test -n "$(QUIRE_PROJECT_URL)" || { \
	  echo "make: name the address of the repository: make dist QUIRE_PROJECT_URL=https://HOST/OWNER/quire" >&2; exit 1; }

clean: ## remove the environments and all generated files
	rm -rf .venv .venv-* build dist src/*.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache docs/*.md.new
	rm -f $(NATIVE)/*.so
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools comes first and builds Quire itself: an isolated build would fetch one that constraints.txt does not pin. The native
# kernels are compiled while pip, which uses one core, installs the rest.
$(READY): pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no '$(PYTHON)' here; name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: $$($(PYTHON) --version) is too old, Quire needs 3.10 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: this $(PYTHON) cannot make virtual environments: its module ensurepip or venv is missing." >&2; \
	  echo "      On Debian and Ubuntu it is in the package python3-venv." >&2; exit 1; }
	@echo "Installing torch, triton and the tools into $(VENV). This happens once and takes a minute or a few."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) setuptools
	@$(BIN)/python setup.py -q build_ext --inplace & \
	  QUIRE_PURE=1 $(PIP) --no-build-isolation --editable '.[test,lint,docs]'; status=$$?; wait $$! && exit $$status
	@touch $@ $(BUILT)

# The native kernels are built with the package where there is a compiler, and again when their sources change.
$(BUILT): $(READY) setup.py $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h)
	@$(BIN)/python setup.py -q build_ext --inplace
	@touch $@
