# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the documents say is run: code blocks, tables, links. Examples in docstrings run as doctests."""

import inspect
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_nki3d

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@each_document
def test_python_blocks_run(document):
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
        if ">>>" not in block:  # those are doctests
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                exec(compile(block, document.name, "exec"), {})


def test_readme_has_a_block_to_run():
    assert "```python\nimport jax" in (ROOT / "README.md").read_text()


@each_document
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target.split("#")[0]).exists(), f"{document.name} links to {target}"


@each_document
def test_commands_exist(document):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in re.findall(r"\bmake ([a-z-]+)\b(?=[`  ]|$)", document.read_text(), re.MULTILINE):
        assert command in targets, f"{document.name} speaks of make {command}"


def row(*values):
    return np.float32(values).reshape(1, 1, 1, 1, -1)


def test_the_four_conventions():
    """The table in docs/conventions.md; the row of torch is case H1, whose values are in test_cases.py."""
    x, taps = row(1, 2, 3), np.float32([1, 10, 100]).reshape(1, 1, 3, 1, 1)
    ours = jax_nki3d.conv3d_transpose(x, taps[::-1, ::-1, ::-1], stride=(1, 1, 2), padding=(0, 0, 1))
    assert ours.ravel().tolist() == [10, 102, 20, 203, 30]
    settings = ((1, 1, 2), [(0, 0), (0, 0), (1, 1)])
    layout = {"dimension_numbers": ("NCDHW", "DHWIO", "NCDHW")}
    assert jax.lax.conv_transpose(x, taps, *settings, **layout).ravel().tolist() == [10, 201, 20, 302, 30]
    adjoint = jax.lax.conv_transpose(x, taps, *settings, **layout, transpose_kernel=True)
    assert adjoint.ravel().tolist() == [10, 102, 20, 203, 30]


def test_the_mean_that_stalls():
    """README: what plain JAX makes of 16³ bfloat16 ones, and what we do."""
    ones = jax.numpy.ones((1, 1, 16, 16, 16), "bfloat16")
    assert float(jax_nki3d.avg_pooling_3d(ones, 16).sum()) == 1.0


@pytest.mark.parametrize("name", jax_nki3d.__all__)
def test_public_names_are_documented(name):
    public = getattr(jax_nki3d, name)
    text = inspect.getdoc(public)
    assert "Example:" in text
    assert ">>>" in text
    if inspect.isfunction(inspect.unwrap(public)):
        for parameter in inspect.signature(public).parameters.values():
            assert re.search(rf"^ *{parameter.name}: ", text, re.MULTILINE), f"`{parameter.name}` is missing"
