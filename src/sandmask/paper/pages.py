"""The generated parts of the documentation: tables and pictures between two comments, filled from results.

    <!-- table table-3 -->        the words of results/paper/table-3.md
    <!-- end -->

    <!-- picture figure-1: what it shows -->      docs/images/paper-figure-1.png, taken over from results if it is there
    <!-- end -->

Everything else on a page is written by hand. What has no results yet says so.
"""

import re
import shutil
from pathlib import Path

from sandmask._replacing import replacing
from sandmask.errors import SandmaskError

MISSING = "*There are no results of this yet.*"
_BLOCK = re.compile(r"<!-- (table|picture) ([\w-]+)(?:: ([^>]*?))? -->\n(.*?)<!-- end -->", re.DOTALL)


def fill_page(text: str, results: Path, images: Path) -> str:
    """A page with its generated parts made anew."""

    def block(found: re.Match[str]) -> str:
        kind, name, words = found[1], found[2], found[3] or ""
        opening = f"<!-- {kind} {name}{': ' + words if words else ''} -->"
        content = _table(results / f"{name}.md") if kind == "table" else _picture(name, words, images)
        return f"{opening}\n{content}\n<!-- end -->"

    return _BLOCK.sub(block, text)


def _table(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else MISSING


def _picture(name: str, words: str, images: Path) -> str:
    file = images / f"paper-{name}.png"
    return f"![{words}](../images/{file.name})" if file.is_file() else MISSING


def fill_pages(results: Path, docs: Path) -> list[Path]:
    """Take pictures over from `results`, fill every page in docs/paper, and return those that changed."""
    pages = sorted((docs / "paper").glob("*.md"))
    if not pages:
        raise SandmaskError(f"{docs / 'paper'} has no pages. Name the documentation's folder with --docs.")
    images = docs / "images"
    for picture in sorted(results.glob("*.png")):
        shutil.copyfile(picture, images / f"paper-{picture.name}")
    changed = []
    for page in pages:
        old = page.read_text(encoding="utf-8")
        new = fill_page(old, results, images)
        if new != old:
            with replacing(page) as temporary:
                temporary.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed
