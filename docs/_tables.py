"""Hook of mkdocs: lists of algorithms and datasets become tables with the registries' descriptions."""  # noqa: INP001

import re
from typing import Any

from sandmask.algorithms import ALGORITHMS
from sandmask.datasets import DATASETS

# A line such as: - **Baselines**: `ERM`, `Mixup`
GROUP = re.compile(r"^- \*\*(.+)\*\*: (`[^`]+`(?:, `[^`]+`)*)$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called for every page before it is rendered."""
    described = {"algorithms.md": _algorithms, "data.md": _datasets}.get(page.file.src_uri)
    return GROUP.sub(lambda group: _table(group[1], described(_names(group[2]))), markdown) if described else markdown


def _names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _algorithms(names: list[str]) -> list[tuple[str, ...]]:
    entries = [ALGORITHMS[name] for name in names]
    return [("name", "what it does", "paper"), *((f"`{e.name}`", e.summary, e.paper) for e in entries)]


def _datasets(names: list[str]) -> list[tuple[str, ...]]:
    entries = [DATASETS[name] for name in names]
    rows = ((f"`{e.name}`", e.description, ", ".join(e.environments)) for e in entries)
    return [("name", "content", "environments"), *rows]


def _table(title: str, rows: list[tuple[str, ...]]) -> str:
    header, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"### {title}", "", header, "|---" * len(rows[0]) + "|", *body, ""])
