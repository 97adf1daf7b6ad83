# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The notebooks as they are committed: sources, outputs, size. `python notebooks/execute.py --check` runs them, which takes minutes."""

import getpass
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
BYTES = 600_000
HEADER = ["# ---", "# jupyter:", "#   jupytext:"]


def load_execute():
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = load_execute()
SOURCES = execute.sources()
each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def committed(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def outputs_of(notebook):
    """(cell number, output) of every output."""
    return [(i, output) for i, cell in enumerate(notebook.cells, 1) for output in cell.get("outputs", ())]


def text_of(output):
    """All that an output shows as text."""
    data = output.get("data", {})
    parts = [output.get("text", ""), *(value for kind, value in data.items() if kind.startswith("text/"))]
    return "\n".join(part if isinstance(part, str) else "".join(part) for part in parts)


def test_every_notebook_is_a_pair():
    assert {"quickstart", "brain_unet", "inside_a_kernel", "from_pytorch"} <= {path.stem for path in SOURCES}
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {path.stem for path in SOURCES}
    assert {path.stem for path in FOLDER.glob("*.py")} == {path.stem for path in SOURCES} | {"execute"}


@each_notebook
def test_sources_are_equal(source):
    assert execute.differences(committed(source), execute.read_source(source)) is None


@each_notebook
def test_metadata_is_the_same_on_every_machine(source):
    lines = source.read_text().splitlines()
    assert lines[:3] == HEADER
    header = "\n".join(lines[: lines.index("# ---", 1)])
    assert "formats: ipynb,py:percent" in header
    assert "name: python3" in header
    assert not re.search(r"^#\s+jupytext_version:", header, re.MULTILINE)
    notebook = committed(source)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"jupytext", "kernelspec", "language_info"}
    assert "version" not in notebook.metadata.language_info
    assert [cell.id for cell in notebook.cells] == [f"cell-{i}" for i in range(1, len(notebook.cells) + 1)]
    assert all(not cell.metadata for cell in notebook.cells)


@each_notebook
def test_every_cell_ran_without_errors_or_warnings(source):
    notebook = committed(source)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for number, output in outputs_of(notebook):
        assert output.output_type != "error", number
        assert output.get("name") != "stderr", (number, output.text)
        assert not re.search(r"Traceback|\w*Warning:", text_of(output)), number
        assert len(text_of(output).splitlines()) < 100, f"cell {number} prints too much"


@each_notebook
def test_outputs_name_no_machine(source):
    user = getpass.getuser()
    names = [str(FOLDER.parent), str(Path.home()) + "/", *([f"/{user}/"] if user else [])]
    for number, output in outputs_of(committed(source)):
        text = text_of(output)
        assert not any(name in text for name in names), number
        # a path from the root of the file system, or of a drive
        assert not re.search(r"(?<![\w.)\]/])/(home|Users|root|tmp|usr|var|opt|mnt|work|private)/|\b[A-Z]:\\", text), number


@each_notebook
def test_it_is_small_and_has_pictures(source):
    assert source.with_suffix(".ipynb").stat().st_size < BYTES
    assert any("image/png" in output.get("data", {}) for _, output in outputs_of(committed(source)))


@each_notebook
def test_it_starts_with_a_list_of_what_it_shows(source):
    first = committed(source).cells[0]
    assert first.cell_type == "markdown"
    assert re.match(r"# \S", first.source)
    assert re.search(r"second|minute", first.source.partition("\n")[2]), "how long it takes"
    assert len(re.findall(r"^- ", first.source, re.MULTILINE)) >= 3


@each_notebook
def test_it_checks_what_it_says(source):
    assert any("assert" in cell.source for cell in committed(source).cells if cell.cell_type == "code")


def test_the_readme_lists_every_notebook_and_its_links_lead_somewhere():
    text = (FOLDER / "README.md").read_text()
    assert {target.removesuffix(".ipynb") for target in re.findall(r"^\| \[\w+\]\(([^)]+)\)", text, re.MULTILINE)} == {
        path.stem for path in SOURCES
    }
    cells = [cell.source for source in SOURCES for cell in committed(source).cells if cell.cell_type == "markdown"]
    for document in (text, *cells):
        for target in re.findall(r"\]\(([^)\s]+)\)", document):
            assert "://" in target or (FOLDER / target).exists(), target


# ---- the program that executes them ----------------------------------------------------------------------------------


def run(*arguments):
    return subprocess.run(
        [sys.executable, FOLDER / "execute.py", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def pair(tmp_path):
    """A notebook with one good cell and one that fails, and the .ipynb of an older source."""
    source = tmp_path / "broken.py"
    source.write_text(
        "\n".join([*HEADER, "#     formats: ipynb,py:percent", "# ---", "", "# %%", "1 + 1", "", "# %%", "1 / 0"])
    )
    older = execute.read_source(source)
    older.cells[1].source = "1 / 1"
    jupytext.write(older, source.with_suffix(".ipynb"), fmt="ipynb")
    return source


def test_a_cell_that_fails_is_named_and_nothing_is_written(pair):
    before = pair.with_suffix(".ipynb").read_text()
    result = run(pair)
    assert result.returncode == 1
    assert "broken: cell 2 of 2 ('1 / 0') fails" in result.stdout
    assert "ZeroDivisionError" in result.stdout
    assert pair.with_suffix(".ipynb").read_text() == before


def test_check_finds_an_old_ipynb(pair):
    result = run("--check", pair)
    assert result.returncode == 1
    assert "broken.ipynb was not made from broken.py: cell 2 differs" in result.stdout


def test_the_seconds_of_a_notebook_are_a_limit_for_all_cells_together(tmp_path):
    source = tmp_path / "slow.py"
    source.write_text(
        "\n".join(
            [
                *HEADER,
                "#     formats: ipynb,py:percent",
                "# ---",
                "",
                "# %%",
                "import time; time.sleep(1)",
                "",
                "# %%",
                "time.sleep(60)",
            ]
        )
    )
    result = run("--seconds", 2, source)
    assert result.returncode == 1
    assert "slow: cell 2 of 2 ('time.sleep(60)') was still running after the 2 s" in result.stdout


def test_an_unknown_notebook_is_an_error():
    result = run("no_such_notebook")
    assert result.returncode == 2
    assert "There is no notebook no_such_notebook: found " in result.stderr
    assert "quickstart" in result.stderr
