"""What a figure or table consists of, and how it is written: pictures, words, and the data behind them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandmask.reports import Grid, latex, markdown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Report = Callable[[str, int, int], None]  # what is being done, how much of it is, of how much


def silent(what: str, done: int, total: int) -> None:
    """A report that nobody hears."""


@dataclass(frozen=True)
class Product:
    """A remade figure or table. Names are file names without an ending."""

    name: str
    title: str
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    data: Mapping[str, "pd.DataFrame"] = field(default_factory=dict)
    grids: tuple[Grid, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)  # the few numbers that a script would ask for

    def words(self) -> str:
        """The tables in Markdown."""
        return markdown(self.grids)


def write_product(product: Product, out: Path) -> list[Path]:
    """Write figures as PNG and PDF, tables as Markdown and LaTeX, data as CSV; the files' paths."""
    from sandmask.paper._style import style

    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in product.figures.items():
        for kind in ("png", "pdf"):
            # Without the date, the same figure is the same file.
            metadata: Any = {"CreationDate": None} if kind == "pdf" else {"Software": None}

            def save(path: Path, figure: "Figure" = figure, kind: str = kind, metadata: Any = metadata) -> None:
                with style():
                    figure.savefig(path, format=kind, dpi=160, metadata=metadata)

            written.append(_whole(out / f"{name}.{kind}", save))
    for name, frame in product.data.items():
        written.append(_whole(out / f"{name}.csv", lambda path, frame=frame: frame.to_csv(path, index=False)))
    if product.grids:
        for kind, text in (("md", product.words()), ("tex", latex(product.grids))):
            written.append(
                _whole(out / f"{product.name}.{kind}", lambda path, text=text: path.write_text(text, "utf-8"))
            )
    return written


def _whole(path: Path, save: Callable[[Path], object]) -> Path:
    """Write under another name, then rename: a file is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        save(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
