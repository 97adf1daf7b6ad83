# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation site: `sphinx-build -W --keep-going -n docs build/docs`. Nothing is fetched."""

import json
import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "jax_nki3d"
author = "The jax_nki3d Authors"
copyright = author  # Sphinx reads a variable of this name
# Read, not imported: other tools import this file, too, and JAX takes seconds.
version = release = re.search(r'__version__ = "(.*)"', (ROOT / "jax_nki3d" / "_version.py").read_text()).group(1)

# No intersphinx: the inventories of other projects would have to be fetched.
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["**.ipynb_checkpoints"]
html_theme = "sphinx_book_theme"
html_title = f"jax_nki3d {version}"
html_theme_options = {"show_toc_level": 2}
html_show_copyright = False

# The outputs of the notebooks are committed; another target executes them.
nb_execution_mode = "off"
# Links to headings, `page.md#heading`, as GitHub writes them.
myst_heading_anchors = 3
# The prompts of doctests are not copied, nor is what they print.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# In docstrings, single backticks are literals, as in Markdown.
default_role = "code"
smartquotes = False
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Numerics", "Layout", "Dimensions", "Pseudocode", ("Members", "params_style")]

nitpick_ignore_regex = [
    # Types of other projects, whose inventories are not fetched.
    (r"py:.*", r"(jax|jaxtyping|numpy|np|flax|nnx|nn|haiku|hk|equinox|eqx|torch|ast|os|collections|types|typing)\..*"),
    # The names under which our annotations import them, and our own aliases of unions.
    (r"py:.*", r"(Array|Sequence|Callable|Any|Dtype|Initializer|PromoteDtypeFn|ConvGeneralDilatedT|PrecisionLike|optional)"),
]


# ---- docstrings ------------------------------------------------------------------------------------------------------

# Sections that the docstrings open with a word and a colon in front of running text.
_RUNNING_SECTION = re.compile(r"^(Numerics|Layout|Dimensions): +(.+)$")
# Where the text that follows is set as it stands.
_VERBATIM = ("Pseudocode:",)
_OPERATIONS = ("conv3d", "conv3d_bwd", "conv3d_transpose", "avg_pooling_3d", "avg_pooling_3d_backward")


def _google_to_rst(app, what, name, obj, options, lines):
    """Before napoleon: sections that begin in running text get a header, formulas become literal blocks, our names become links."""
    del app, what, obj, options
    out: list[str] = []
    # Where we are: "text" outside of sections, "formula" in an indented paragraph there, "running" in a section whose text is not
    # indented, "section" in one whose text is, "verbatim" in one that is set as it stands.
    place = "text"
    for line in lines:
        running = _RUNNING_SECTION.match(line)
        if running:
            out += ["", f"{running[1]}:", f"    {running[2]}"]
            place = "running"
        elif line in _VERBATIM:
            out += [line, "    .. code-block:: text", ""]
            place = "verbatim"
        elif re.fullmatch(r"[A-Z]\w+:", line):
            out.append(line)
            place = "section"
        elif line and place in ("running", "verbatim"):
            out.append(f"    {line}")
        elif place == "text" and line.startswith("    ") and out and not out[-1]:
            out += [".. code-block:: text", "", line]
            place = "formula"
        else:
            # An empty line ends running text; what is not indented ends a formula.
            if (place == "running" and not line) or (place == "formula" and line and not line.startswith(" ")):
                place = "text"
            out.append(line)
    package = "nki3d" if name.startswith("nki3d.") else "jax_nki3d"
    others = [*_OPERATIONS, "ActFnType", *(("options", "explain") if package == "jax_nki3d" else ())]
    pattern = re.compile(rf"(?<![`:\w])`({'|'.join(n for n in others if n != name.rpartition('.')[2])})`(?![`_])")
    lines[:] = [line if ">>>" in line else pattern.sub(rf":py:obj:`~{package}.\1`", line) for line in out]


def _signature_of_init(app, what, name, obj, options, signature, returns):
    """The arguments of a class whose metaclass takes any: those of its __init__."""
    from sphinx.util import inspect  # this file is also imported where Sphinx is not installed

    del app, name, options
    if what == "class" and signature and signature.startswith("(*args"):
        signature = inspect.stringify_signature(inspect.signature(obj.__init__, bound_method=True))
    return signature, returns


# ---- what is outside of docs/ ----------------------------------------------------------------------------------------

_LINK = re.compile(r"\[([^\[\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
# Documents of the root that the site has a page for.
_PAGES = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}


def on_the_site(text: str, written_in: Path, read_in: Path) -> str:
    """Markdown of a file in the folder `written_in`, with its relative links as they must read in a page of the folder `read_in`.

    On GitHub a link leads to a file of the repository. On the site it leads to the page made of that file; to the file itself, as a
    download, where there is no page; and a folder has neither, so that its name alone remains.
    """

    def link(match: re.Match) -> str:
        target = (written_in / match[2]).resolve()
        if target.is_dir():
            return match[1]
        if target.parent == ROOT and target.name in _PAGES:
            target = DOCS / _PAGES[target.name]
        elif target.parent == ROOT / "notebooks" and target.suffix == ".ipynb":
            target = DOCS / "notebooks" / target.name
        return f"[{match[1]}]({Path(os.path.relpath(target, read_in)).as_posix()}{match[3] or ''})"

    parts = _CODE.split(text)  # every other one is code, in which brackets are no links
    return "".join(part if number % 2 else _LINK.sub(link, part) for number, part in enumerate(parts))


def copy_notebooks(source: Path = ROOT / "notebooks", target: Path = DOCS / "notebooks") -> None:
    """Sphinx reads what is below docs/: the notebooks are copied there, with their links changed to those of the site."""
    target.mkdir(exist_ok=True)
    names = {path.name for path in source.glob("*.ipynb")}
    for stale in target.glob("*.ipynb"):
        if stale.name not in names:
            stale.unlink()
    for name in sorted(names):
        notebook = json.loads((source / name).read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = on_the_site("".join(cell["source"]), source, target)
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        # Written only where it differs, so that a second build reads nothing again.
        if not (target / name).exists() or (target / name).read_text() != text:
            (target / name).write_text(text)


def _links(app, docname, source):
    del app
    if not docname.startswith("notebooks/"):
        folder = (DOCS / docname).parent
        source[0] = on_the_site(source[0], folder, folder)


def setup(app):
    """Called by Sphinx."""
    # What autodoc imports must not look for accelerators, nor for a package called `nki`.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NKI3D_SIMULATOR"] = "1"
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    app.connect("builder-inited", lambda app: copy_notebooks())
    app.connect("source-read", _links)
    app.connect("autodoc-process-signature", _signature_of_init)
    app.connect("autodoc-process-docstring", _google_to_rst, priority=400)  # napoleon's is 500
