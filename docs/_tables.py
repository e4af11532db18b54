"""Hook of mkdocs: the groups of docs/algorithms.md become tables with the registry's summaries and papers."""  # noqa: INP001

import re
from typing import Any

from sandmask.algorithms import ALGORITHMS

# A line such as: - **Baselines**: `ERM`, `Mixup`
GROUP = re.compile(r"^- \*\*(.+)\*\*: (`[^`]+`(?:, `[^`]+`)*)$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called for every page before it is rendered."""
    return GROUP.sub(_table, markdown) if page.file.src_uri == "algorithms.md" else markdown


def _table(group: re.Match[str]) -> str:
    entries = [ALGORITHMS[name] for name in re.findall(r"`([^`]+)`", group[2])]
    rows = [f"| `{entry.name}` | {entry.summary} | {entry.paper} |" for entry in entries]
    return "\n".join([f"### {group[1]}", "", "| name | what it does | paper |", "|---|---|---|", *rows, ""])
