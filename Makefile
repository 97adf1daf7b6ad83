# Every target works in a fresh clone: the first one to run makes .venv and installs what is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help venv test test-oldest lint types doctest demo bench bench-torch bench-simulator bench-kernels check clean

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
	$(BIN)/python -m pytest --numprocesses=auto

# The core of the suite on the oldest JAX that is supported, without Flax, which needs a newer one.
OLDEST_JAX := 0.7.2
OLDEST_TESTS := $(addprefix tests/test_,bridge.py cases.py lowering.py options.py plan.py simulate.py transformations.py wanted_gradients.py)

test-oldest: $(VENV)-oldest/.installed ## the core of the test suite on the oldest JAX
	$(VENV)-oldest/bin/python -m pytest --numprocesses=auto $(OLDEST_TESTS)

$(VENV)-oldest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-oldest
	grep -v '^jax' constraints.txt > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --constraint $(VENV)-oldest/constraints.txt --editable . \
		'jax==$(OLDEST_JAX)' 'jaxlib==$(OLDEST_JAX)' chex flatbuffers hypothesis pytest pytest-xdist
	@touch $@

lint: $(INSTALLED) ## ruff: rules and format; the dialect of the NKI kernels
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m nki3d.lint kernels

types: $(INSTALLED) ## mypy
	$(BIN)/mypy

doctest: $(INSTALLED) ## the examples in the docstrings and the README
	$(BIN)/python -m pytest --doctest-modules --doctest-glob='*.md' jax_nki3d kernels/nki3d README.md docs

check: lint types doctest test ## all of the above

demo: $(INSTALLED) ## train a small U-Net on a brain scan; pictures in demo-output/
	$(BIN)/python examples/brain_unet/main.py

bench: $(INSTALLED) ## speed on this machine: ours, plain lax, and torch where it is installed
	$(BIN)/python -m benchmarks

bench-torch: $(INSTALLED) ## install torch for the comparison
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'

# One core and one thread of BLAS: a figure that does not depend on what else the machine does.
bench-simulator: $(INSTALLED) ## speed of the NKI interpreter
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.simulator

bench-kernels: $(INSTALLED) ## what the NKI kernels issue on trn2 (simulated), beside the vendor's; writes docs/kernels.md
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.kernels --markdown docs/kernels.md

clean: ## remove what the targets made
	rm -rf $(VENV) $(VENV)-oldest build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
