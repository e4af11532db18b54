"""The generated parts of the documentation: tables and pictures between two comments, filled from results.

    <!-- table table-3 -->                        results/paper/table-3.md, whole
    <!-- end -->

    <!-- table table-3: Table 3: Spirals -->      the section of that file with this heading, without the heading
    <!-- end -->

    <!-- table h200/stacked: Spirals -->          a name with a slash is a path from results/
    <!-- end -->

    <!-- picture figure-1: what it shows -->      docs/images/paper-figure-1.png, copied from results if it is there
    <!-- end -->

A heading is given by its beginning. Everything else on a page is written by hand. A block without results says so.
"""

import re
import shutil
from pathlib import Path

from sandmask._replacing import replacing
from sandmask.errors import SandmaskError

MISSING = "*There are no results of this yet.*"
_BLOCK = re.compile(r"<!-- (table|picture) ([\w/-]+)(?:: ([^>]*?))? -->\n(.*?)<!-- end -->", re.DOTALL)


def fill_page(text: str, results: Path, images: Path) -> str:
    """Fill the generated blocks of a page.

    :param results: the folder of the paper's results; names with a slash start from the folder above it.
    :param images: the folder of the documentation's pictures.
    """

    def block(found: re.Match[str]) -> str:
        kind, name, words = found[1], found[2], found[3] or ""
        opening = f"<!-- {kind} {name}{': ' + words if words else ''} -->"
        path = (results.parent if "/" in name else results) / f"{name}.md"
        content = _table(path, words) if kind == "table" else _picture(name, words, images)
        return f"{opening}\n{content}\n<!-- end -->"

    return _BLOCK.sub(block, text)


def _table(path: Path, heading: str) -> str:
    if not path.is_file():
        return MISSING
    text = path.read_text(encoding="utf-8").strip()
    return _section(text, heading, path) if heading else text


def _section(text: str, heading: str, path: Path) -> str:
    """What is below the one heading that begins with `heading`, up to the next heading."""
    found = re.findall(rf"^#+ {re.escape(heading)}[^\n]*\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    if len(found) != 1:
        raise SandmaskError(f"{path} has {len(found)} headings that begin with {heading!r}. Name exactly one.")
    section: str = found[0]
    return section.strip()


def _picture(name: str, words: str, images: Path) -> str:
    file = images / f"paper-{name}.png"
    return f"![{words}](../images/{file.name})" if file.is_file() else MISSING


def fill_pages(results: Path, docs: Path) -> list[Path]:
    """Copy pictures from `results`, fill the blocks of every page in `docs`, and return the pages that changed."""
    if not any((docs / "paper").glob("*.md")):
        raise SandmaskError(f"{docs / 'paper'} has no pages. Name the documentation's folder with --docs.")
    images = docs / "images"
    for picture in sorted(results.glob("*.png")):
        shutil.copyfile(picture, images / f"paper-{picture.name}")
    changed = []
    for page in sorted(docs.rglob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = fill_page(old, results, images)
        if new != old:
            with replacing(page) as temporary:
                temporary.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed
