# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sdist and the wheel in dist/, which `make dist` has built: what they hold, and that the tests pass with the wheel alone."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = (ROOT / "jax_nki3d" / "_version.py").read_text().split('"')[-2]


@pytest.fixture(scope="module")
def wheel():
    return ROOT / "dist" / f"jax_nki3d-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources(folder, package):
    """Every module, marker and data file of a package, as it lies in a wheel."""
    files = (file for file in folder.rglob("*") if file.suffix in (".py", ".typed", ".json"))
    return {f"{package}/{file.relative_to(folder).as_posix()}" for file in files}


def test_the_wheel_holds_both_packages_and_nothing_else(names):
    expected = sources(ROOT / "jax_nki3d", "jax_nki3d") | sources(ROOT / "kernels" / "nki3d", "nki3d")
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"jax_nki3d/py.typed", "nki3d/py.typed", "nki3d/nki_api.json"} <= names


def test_the_metadata(wheel, names):
    folder = f"jax_nki3d-{VERSION}.dist-info"
    assert f"{folder}/licenses/LICENSE" in names
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    core = {
        requirement.split(">")[0].split("<")[0]
        for requirement in metadata.get_all("Requires-Dist")
        if "extra" not in requirement
    }
    assert core == {"jax", "ml_dtypes", "numpy"}
    assert "# jax_nki3d" in metadata.get_payload()


def test_the_sdist_can_be_worked_with():
    with tarfile.open(ROOT / "dist" / f"jax_nki3d-{VERSION}.tar.gz") as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "pyproject.toml", "CITATION.cff", "CHANGELOG.md", "Makefile", "constraints.txt"} <= names
    assert {
        "tests/test_values.py",
        "tests/with_torch/test_from_torch.py",
        "docs/index.md",
        "notebooks/quickstart.ipynb",
    } <= names
    assert {"kernels/nki3d/nki_api.json", "benchmarks/vendor_kernels.json", "examples/brain_unet/main.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "build/", "demo-output"))]


def test_the_cases_of_users_pass_with_the_wheel_in_another_folder(wheel, tmp_path):
    """Nothing of the checkout is on the path but a copy of the tests, and what is imported is what the wheel holds."""
    installed, work = tmp_path / "installed", tmp_path / "work"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", installed, wheel]
    subprocess.run(pip, check=True)
    shutil.copytree(ROOT / "tests", work / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", work)
    # with all of XLA's optimizations, as users run it
    optimized = "--xla_backend_optimization_level=3 --xla_llvm_disable_expensive_passes=false"
    environment = os.environ | {"PYTHONPATH": str(installed), "XLA_FLAGS": optimized}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=work, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    where = run("-c", "import jax_nki3d, nki3d; print(jax_nki3d.__file__, nki3d.__file__, jax_nki3d.__version__)")
    assert where.stdout.split() == [*(str(installed / name / "__init__.py") for name in ("jax_nki3d", "nki3d")), VERSION]
    result = run("-m", "pytest", "-q", "--numprocesses=auto", "tests/test_cases.py", "-k", "lax")
    assert result.returncode == 0, result.stdout[-4000:]
