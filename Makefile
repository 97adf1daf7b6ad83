# Every target works in a fresh clone: the first one to run makes .venv and installs what is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help venv test test-torch test-oldest lint types doctest notebooks docs dist demo bench bench-torch bench-simulator bench-kernels check clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

venv: $(INSTALLED) ## .venv with the library, editable, and everything below

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "jax_nki3d needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,demo]'
	@touch $@

test: $(INSTALLED) ## the test suite, one process per core
	$(BIN)/python -m pytest --numprocesses=auto --dist=worksteal

# torch is large and the library never needs it, so that 'make venv' leaves it out.
$(VENV)/.installed-torch: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch]'
	@touch $@

test-torch: $(VENV)/.installed-torch ## the tests of conversions from PyTorch, with torch
	$(BIN)/python -m pytest --numprocesses=auto --dist=worksteal tests/with_torch

SOURCES := $(shell find jax_nki3d kernels -name '*.py' -o -name '*.json' -o -name py.typed)

dist/.built: pyproject.toml MANIFEST.in README.md $(SOURCES) | $(INSTALLED)
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build --outdir dist . > dist.log 2>&1 || { cat dist.log; exit 1; }
	@rm dist.log
	@touch $@

dist: dist/.built ## the sdist, the wheel built from it, and a test of both
	$(BIN)/python -m pytest tests/distribution

# The core of the suite on the oldest JAX that is supported, without Flax, which needs a newer one: the wheel is installed, and the
# tests run in a folder where there is no source beside them.
OLDEST_JAX := 0.7.2
OLDEST_TESTS := $(addprefix tests/test_,bridge.py cases.py lowering.py options.py plan.py simulate.py transformations.py wanted_gradients.py)

test-oldest: $(VENV)-oldest/.installed ## the core of the test suite on the oldest JAX, from the wheel in another folder
	folder=$$(mktemp -d) && trap 'rm -rf $$folder' EXIT && cp -r tests benchmarks pyproject.toml $$folder && \
		python=$$PWD/$(VENV)-oldest/bin/python && cd $$folder && $$python -m pytest --numprocesses=auto --dist=worksteal $(OLDEST_TESTS)

$(VENV)-oldest/.installed: dist/.built constraints.txt
	$(PYTHON) -m venv --clear $(VENV)-oldest
	grep -v '^jax' constraints.txt > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --constraint $(VENV)-oldest/constraints.txt dist/*.whl \
		'jax==$(OLDEST_JAX)' 'jaxlib==$(OLDEST_JAX)' chex flatbuffers hypothesis pytest pytest-xdist
	@touch $@

lint: $(INSTALLED) ## ruff: rules and format; the dialect of the NKI kernels
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m nki3d.lint kernels

types: $(INSTALLED) ## mypy
	$(BIN)/mypy

doctest: $(INSTALLED) ## the examples in the docstrings and the documents
	$(BIN)/python -m pytest --numprocesses=auto --dist=worksteal --doctest-modules --doctest-glob='*.md' jax_nki3d kernels/nki3d README.md docs

$(VENV)/.installed-docs: $(VENV)/.installed-torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

notebooks: $(VENV)/.installed-docs ## run the notebooks and keep their outputs; an error in one is an error here
	$(BIN)/python notebooks/execute.py

docs: $(VENV)/.installed-docs ## the site, in build/docs (installs torch); warnings and dead links are errors
	rm -rf build/docs
	$(BIN)/sphinx-build -W --keep-going -n -q docs build/docs
	$(BIN)/python docs/check_links.py build/docs

check: lint types doctest test ## lint, types, doctest and test

demo: $(INSTALLED) ## train a small U-Net on a brain scan; pictures in demo-output/
	$(BIN)/python examples/brain_unet/main.py

bench: $(INSTALLED) ## speed on this machine: ours, plain lax, and torch where it is installed
	$(BIN)/python -m benchmarks

bench-torch: $(VENV)/.installed-torch ## install torch, and bench
	$(BIN)/python -m benchmarks

# One core and one thread of BLAS: a figure that does not depend on what else the machine does.
bench-simulator: $(INSTALLED) ## speed of the NKI interpreter
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.simulator

bench-kernels: $(INSTALLED) ## what the NKI kernels issue on trn2 (simulated), beside the vendor's; writes docs/kernels.md
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.kernels --markdown docs/kernels.md

clean: ## remove what the targets made
	rm -rf docs/notebooks *.egg-info $(VENV) $(VENV)-oldest build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
