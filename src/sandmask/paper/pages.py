"""Fill the generated parts of documentation pages from results: blocks between two comments, and single cells.

    <!-- table table-3 -->                        results/paper/table-3.md, whole
    <!-- end -->

    <!-- table table-3: Table 3: Spirals -->      the section of that file with this heading, without the heading
    <!-- end -->

    <!-- table h200/stacked: Spirals -->          a name with a slash is a path from results/
    <!-- end -->

    <!-- picture figure-1: what it shows -->      docs/images/paper-figure-1.png, copied from results if it is there
    <!-- end -->

    <data value="paper/table-3 / Table 3 / ERM / oracle">84.5 ± 0.7</data>      a cell: file / heading / row / column
    <data value="paper/quoted / ERM on environment 0">61.5</data>              file / row: the last cell of the row

A heading is named by its beginning, and a row by one or several of its cells, joined by "; ". The page shows the part
of a cell before its first bracket. The column "oracle, paper" is the part of "oracle" in square brackets. A block
without results says so; a cell without results raises an error.
"""

import html
import re
import shutil
from pathlib import Path

from sandmask._files import replacing
from sandmask.errors import SandmaskError

MISSING = "*There are no results of this yet.*"
_BLOCK = re.compile(r"<!-- (table|picture) ([\w/-]+)(?:: ([^>]*?))? -->\n(.*?)<!-- end -->", re.DOTALL)
_VALUE = re.compile(r'<data value="([^"]+)">[^<]*</data>')
_PAPER = ", paper"


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

    def value(found: re.Match[str]) -> str:
        return f'<data value="{found[1]}">{look_up(results.parent, html.unescape(" ".join(found[1].split())))}</data>'

    return _VALUE.sub(value, _BLOCK.sub(block, text))


def look_up(root: Path, reference: str) -> str:
    """Return the cell that a `<data>` element refers to.

    :param root: the folder of all results.
    :param reference: "file / row" or "file / heading / row / column", as the module's docstring describes.
    """
    parts = reference.split(" / ")
    path = root / f"{parts[0]}.md"
    if len(parts) not in (2, 4) or not path.is_file():
        raise SandmaskError(
            f"{reference!r} does not name a cell. Write `file / row` or `file / heading / row / column`."
        )
    text = path.read_text(encoding="utf-8")
    heading, wanted, *rest = parts[1:] if len(parts) == 4 else ("", parts[1])
    rows = _rows(_section(text, heading, path) if heading else text)
    found = [row for row in rows if set(wanted.split("; ")) <= set(row)]
    column = rest[0].removesuffix(_PAPER) if rest else rows[0][-1] if rows else ""
    if len(found) != 1 or column not in rows[0]:
        raise SandmaskError(f"{path} has {len(found)} rows {wanted!r} with a column {column!r}. Name exactly one cell.")
    cell = found[0][rows[0].index(column)]
    if rest and rest[0].endswith(_PAPER):
        return cell.partition("[")[2].partition("]")[0]
    return re.split(r" [\[(]", cell)[0]


def _rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows in a Markdown text, beginning with the header."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line)]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def _table(path: Path, heading: str) -> str:
    if not path.is_file():
        return MISSING
    text = path.read_text(encoding="utf-8").strip()
    return _section(text, heading, path) if heading else text


def _section(text: str, heading: str, path: Path) -> str:
    """Return the text below the heading that begins with `heading`, up to the next heading."""
    found = re.findall(rf"^#+ {re.escape(heading)}[^\n]*\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    if len(found) != 1:
        raise SandmaskError(f"{path} has {len(found)} headings that begin with {heading!r}. Name exactly one.")
    section: str = found[0]
    return section.strip()


def _picture(name: str, words: str, images: Path) -> str:
    file = images / f"paper-{name}.png"
    return f"![{words}](../images/{file.name})" if file.is_file() else MISSING


def fill_pages(results: Path, docs: Path) -> list[Path]:
    """Fill the generated blocks of every page, and return the pages that changed.

    :param results: the folder of the paper's results, whose pictures are copied. Pages in this folder are filled too.
    :param docs: the folder of the documentation.
    """
    if not any((docs / "paper").glob("*.md")):
        raise SandmaskError(f"{docs / 'paper'} has no pages. Name the documentation's folder with --docs.")
    images = docs / "images"
    for picture in sorted(results.glob("*.png")):
        shutil.copyfile(picture, images / f"paper-{picture.name}")
    changed = []
    for page in [*sorted(docs.rglob("*.md")), *sorted(results.glob("*.md"))]:
        old = page.read_text(encoding="utf-8")
        new = fill_page(old, results, images)
        if new != old:
            with replacing(page) as temporary:
                temporary.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed
