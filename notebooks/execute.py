# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Execute the notebooks from their .py sources and write the .ipynb beside them, with outputs.

Each notebook is a pair of one name: the .py (py:percent, read by jupytext) is what people edit and review, the .ipynb is made from it.
What changes from one execution to the next (times, versions, random ids) is left out of the .ipynb.
"""

import argparse
import sys
import time
from pathlib import Path

import jupytext
from jupyter_client.kernelspec import NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from rich.console import Console
from rich.text import Text
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parent
SECONDS = 180
FORMAT = "py:percent"

console = Console(highlight=False, soft_wrap=True)


class Failure(Exception):
    """A notebook that cannot be read, does not run, or whose .ipynb is not up to date; the message names it, and the cell."""


def sources(folder: Path = FOLDER) -> list[Path]:
    """The .py of every notebook in a folder: those with the header of jupytext."""
    return sorted(path for path in folder.glob("*.py") if "#   jupytext:" in path.read_text().splitlines()[:4])


def read_source(path: Path) -> NotebookNode:
    """The notebook of a .py, without outputs, with metadata and cell ids that are the same on every machine."""
    return normalized(jupytext.read(path, fmt=FORMAT))


def normalized(notebook: NotebookNode) -> NotebookNode:
    """The notebook, changed in place, without what another execution or another machine would write differently."""
    notebook.metadata.get("jupytext", {}).get("text_representation", {}).pop("jupytext_version", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    notebook.metadata.pop("widgets", None)
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number}"
        for key in ("execution", "lines_to_next_cell"):
            cell.metadata.pop(key, None)
    return notebook


def texts(notebook: NotebookNode) -> list[tuple[str, str]]:
    """What a .py and its .ipynb must agree on: the kind and the source of each cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def execute(notebook: NotebookNode, name: str, folder: Path, seconds: float) -> None:
    """Run every cell in `folder` and keep the outputs; all cells together may take `seconds`.

    Raises:
        Failure: a cell fails, or the time is over.
    """
    deadline = time.monotonic() + seconds
    current = 0

    def note(cell: NotebookNode, cell_index: int) -> None:
        nonlocal current
        current = cell_index

    client = NotebookClient(
        notebook,
        resources={"metadata": {"path": str(folder)}},
        timeout_func=lambda cell: max(1e-3, deadline - time.monotonic()),
        coalesce_streams=True,
        record_timing=False,
        store_widget_state=False,
        on_cell_execute=note,
        config=Config(KernelManager={"transport_encryption": "auto"}),  # a kernel that is not encrypted warns
    )
    try:
        client.execute()
    except NoSuchKernel as error:
        raise Failure(f"{name}: there is no Jupyter kernel {error.name!r}. Install ipykernel.") from error
    except CellExecutionError as error:
        raise Failure(f"{where(notebook, name, current)} fails.\n{error}") from error
    except CellTimeoutError as error:
        raise Failure(f"{where(notebook, name, current)} was still running after the {seconds:g} s of the notebook.") from error
    except DeadKernelError as error:
        raise Failure(f"{where(notebook, name, current)} ended the kernel: out of memory, or a crash.") from error


def where(notebook: NotebookNode, name: str, index: int) -> str:
    """A cell as people find it: the notebook, the cell's number, its first line."""
    first = next((line for line in notebook.cells[index].source.splitlines() if line.strip()), "")
    return f"{name}: cell {index + 1} of {len(notebook.cells)} ({first!r})"


def differences(committed: NotebookNode, source: NotebookNode) -> str | None:
    """How the sources of an .ipynb differ from its .py; None if they don't."""
    there, here = texts(committed), texts(source)
    for number, (one, other) in enumerate(zip(there, here, strict=False), 1):
        if one != other:
            return f"cell {number} differs: {one[1].splitlines()[:1]} there, {other[1].splitlines()[:1]} in the .py"
    return None if len(there) == len(here) else f"{len(there)} cells there, {len(here)} in the .py"


def run(path: Path, check: bool, seconds: float) -> None:
    """Execute one notebook; write its .ipynb, or with `check` compare it.

    Raises:
        Failure: it does not run, or `check` finds an .ipynb that is missing or made from another source.
    """
    target = path.with_suffix(".ipynb")
    notebook = read_source(path)
    if check:
        if not target.exists():
            raise Failure(f"{path.stem}: {target.name} is missing. Run notebooks/execute.py {path.stem}.")
        found = differences(jupytext.read(target), notebook)
        if found is not None:
            raise Failure(
                f"{path.stem}: {target.name} was not made from {path.name}: {found}. Run notebooks/execute.py {path.stem}."
            )
    execute(notebook, path.stem, path.parent, seconds)
    if not check:
        jupytext.write(normalized(notebook), target, fmt="ipynb")


def chosen(names: list[str]) -> list[Path]:
    """The .py of the notebooks that are named: by name, or by the path of either file; all of them without names.

    Raises:
        Failure: there is no such notebook.
    """
    paths = [Path(name) if Path(name).parent != Path() else FOLDER / name for name in names]
    paths = [path.with_suffix(".py") for path in paths]
    for path in paths:
        if path not in sources(path.parent):
            raise Failure(f"There is no notebook {path.stem}: found {', '.join(p.stem for p in sources())}.")
    return paths or sources()


def main() -> int:
    """Execute notebooks, one line each; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "notebooks", nargs="*", metavar="NOTEBOOK", help="names, such as quickstart (default: all in this folder)"
    )
    parser.add_argument(
        "--check", action="store_true", help="execute, write nothing, and fail if an .ipynb is not that of its .py"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="that all cells of one notebook may take together (default: %(default)s)"
    )
    arguments = parser.parse_args()
    failed = 0
    try:
        paths = chosen(arguments.notebooks)
    except Failure as failure:
        parser.error(str(failure))
    for path in paths:
        start = time.monotonic()
        try:
            with console.status(f"{path.stem} ..."):
                run(path, arguments.check, arguments.seconds)
        except Failure as failure:
            failed += 1
            console.print(f"{path.stem:<20} [bold red]failed[/] after {time.monotonic() - start:.0f} s")
            console.print(Text.from_ansi(str(failure)))  # IPython colours its tracebacks
        else:
            console.print(f"{path.stem:<20} {time.monotonic() - start:4.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
