# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each module of layers needs its own library alone."""

import subprocess
import sys

import pytest

LIBRARIES = {"flax_nnx": "flax", "flax_linen": "flax", "haiku": "haiku", "equinox": "equinox", "torch": None}
ALL = ("flax", "haiku", "equinox", "torch", "optax", "chex")


def run(module, missing):
    """Imports a module where some packages are not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); import {module}; print(*sys.modules)"
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", LIBRARIES)
def test_a_module_of_layers_needs_its_library_alone(module):
    # Flax and Haiku bring some of the others with them
    brings = {"flax": ("flax", "optax", "chex"), "haiku": ("haiku",), "equinox": ("equinox",), None: ()}[LIBRARIES[module]]
    result = run(f"jax_nki3d.nn.{module}", [name for name in ALL if name not in brings])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", [name for name, library in LIBRARIES.items() if library])
def test_without_its_library_the_error_names_it(module):
    result = run(f"jax_nki3d.nn.{module}", [LIBRARIES[module]])
    assert result.returncode == 1
    assert f"No module named '{LIBRARIES[module]}'" in result.stderr or f"import of {LIBRARIES[module]}" in result.stderr


def test_the_library_itself_imports_none_of_them():
    result = run("jax_nki3d, jax_nki3d.nn", list(ALL))
    assert result.returncode == 0, result.stderr
