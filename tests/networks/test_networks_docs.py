"""The documented example runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"


def test_the_example_in_the_documentation_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert getattr(names["logits"], "shape", None) == (2, 7)
