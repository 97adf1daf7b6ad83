# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python docs/check_links.py [build/docs]`: every relative link, image and anchor of the built site leads somewhere. Fetches nothing."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.targets.append(value)
            elif value and (name == "id" or (name == "name" and tag == "a")):
                self.anchors.add(value)


def read(path: Path) -> _Page:
    """A page, parsed."""
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def dead_links(site: Path) -> list[str]:
    """A line for each link that leads nowhere."""
    # _static also holds templates of the theme
    found = (path for path in sorted(site.rglob("*.html")) if "_static" not in path.relative_to(site).parts)
    pages = {path.resolve(): read(path) for path in found}
    dead = []
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            name = path.relative_to(site.resolve())
            if not file.exists():
                dead.append(f"{name}: {target}: no such file")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
                dead.append(f"{name}: {target}: no such anchor")
    return dead


def main(site: Path) -> int:
    """Prints the dead links; 1 if there are any, or no page."""
    count = len(list(site.rglob("*.html")))
    dead = dead_links(site)
    print("\n".join([*dead, f"{count} pages, {len(dead)} dead links"]))
    return int(bool(dead) or not count)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs")))
