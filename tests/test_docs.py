"""What the documentation shows is true: its code runs, its links lead somewhere, its commands exist."""

import ast
import doctest
import importlib
import io
import re
import runpy
import shlex
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]
from markdown.extensions.toc import slugify  # type: ignore[import-untyped]

import sandmask
from sandmask.algorithms import ALGORITHMS
from sandmask.cli._app import COMMANDS
from sandmask.datasets import DATASETS
from sandmask.hparams import parse_overrides
from sandmask.masks import _errors
from sandmask.networks import NETWORKS
from sandmask.records import MEASURES
from sandmask.registry import Registry
from sandmask.selection import RULES
from sandmask.training import make_spec
from sandmask.training.specs import early_end_of

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sandmask"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]


@dataclass(frozen=True)
class Block:
    """A fenced block; `comment` is the HTML comment right above it."""

    language: str
    code: str
    line: int
    comment: str


def read_blocks(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    found, start = [], None
    for number, line in enumerate(lines):
        if line.startswith("```") and start is None:
            start = number
        elif line.startswith("```") and start is not None:
            above = re.fullmatch(r"<!-- (.*) -->", lines[start - 1]) if start else None
            code = "\n".join(lines[start + 1 : number]) + "\n"
            found.append(Block(lines[start][3:].strip(), code, start + 2, above.group(1) if above else ""))
            start = None
    assert start is None, f"{page.name}: the block at line {(start or 0) + 1} has no end"
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- Python


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with some photos, registries to write into, and what torchrun tells a lone process."""
    from PIL import Image

    for domain in ("north", "south", "west"):
        for kind in ("benign", "malignant"):
            folder = tmp_path / "photos" / "by_hospital" / domain / kind
            folder.mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(folder / "0.png")
    monkeypatch.chdir(tmp_path)
    for registry in (ALGORITHMS, DATASETS, NETWORKS, RULES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(_errors, "_warned", set())
    lone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any that is free
    }
    for variable, value in lone.items():
        monkeypatch.setenv(variable, value)
    with torch.random.fork_rng(devices=[]):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    if block.language == "python":
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        exec(code, namespace)
        return
    test = doctest.DocTestParser().get_doctest(block.code, namespace, page.name, str(page), block.line - 1)
    output = io.StringIO()
    failed, attempted = doctest.DocTestRunner(verbose=False).run(test, out=output.write, clear_globs=False)
    namespace.update(test.globs)
    assert attempted > 0
    assert failed == 0, output.getvalue()


def expected_warning(block: Block) -> AbstractContextManager[object]:
    """`<!-- warns: MaskWarning -->` above a block: it must. Elsewhere warnings are errors."""
    if not block.comment.startswith("warns: "):
        return nullcontext()
    return pytest.warns(getattr(sandmask, block.comment.removeprefix("warns: ")))


WITH_PYTHON = [page for page in PAGES if any(b.language in ("python", "pycon") for b in read_blocks(page))]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    for block in read_blocks(page):
        if block.language not in ("python", "pycon"):
            continue
        if block.comment.startswith("not run:"):
            assert block.comment.removeprefix("not run:").strip(), f"{page.name}:{block.line} has no reason"
            continue
        with expected_warning(block):
            run(block, page, vars(module))


MODULES = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_examples_in_docstrings_run(path: Path) -> None:
    dotted = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    with torch.random.fork_rng(devices=[]):
        failed, attempted = doctest.testmod(importlib.import_module(dotted))
    assert attempted > 0
    assert failed == 0


# --- Commands


def shown_lines(page: Path) -> list[str]:
    """The commands of console blocks."""
    shown = [b.code.splitlines() for b in read_blocks(page) if b.language in ("console", "bash", "sh")]
    lines = [line for block in shown for line in block if line.startswith(("$ ", "sandmask "))]
    return [re.sub(r"^(\$ )?(torchrun .* -m (?=sandmask ))?", "", line) for line in lines]


def mentioned(page: Path) -> list[str]:
    """`sandmask ...` in running text; it need not be complete."""
    return [" ".join(found.split()) for found in re.findall(r"`(sandmask [a-z-][^`]*)`", prose(page))]


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command object that the words lead to, and what is left of them."""
    (entry,) = [command for command in COMMANDS if command.name == words[0]]
    assert entry.exists, f"sandmask {words[0]} is not there"
    command, rest = entry.load(), words[1:]
    while rest and hasattr(command, "commands"):
        assert rest[0] in command.commands, f"sandmask {' '.join(words)}: no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def check_options(command: Any, rest: list[str]) -> None:
    known = {"--help", "-h"} | {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
    unknown = {word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)} - known
    assert not unknown, f"{command.name} has no option {unknown}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_commands_exist(page: Path) -> None:
    for line in [*shown_lines(page), *mentioned(page)]:
        words = shlex.split(line, comments=True)
        if words[0] == "sandmask" and not words[1].startswith("-"):
            command, rest = find_command(words[1:])
            check_options(command, rest)
        if words[0] == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            assert set(words[1:]) <= set(targets), line
        if words[:2] == ["python", "-m"]:
            assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_command_lines_parse(page: Path) -> None:
    for line in shown_lines(page):
        words = shlex.split(line, comments=True)
        if words[0] == "sandmask" and not words[1].startswith("-") and "--help" not in words:
            command, rest = find_command(words[1:])
            command.make_context(words[1], rest)  # raises where click would complain; runs nothing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_documented_runs_train_something(page: Path) -> None:
    """A mask with too high a threshold is zero everywhere, and a penalty may start after the last step."""
    for line in shown_lines(page):
        words = shlex.split(line, comments=True)
        if words[:2] != ["sandmask", "train"] or words[3] not in ALGORITHMS:
            continue
        given = find_command(words[1:])[0].make_context("train", words[2:]).params
        chosen = ALGORITHMS[given["algorithm"]]
        dataset = DATASETS[given["dataset"]] if given["dataset"] in DATASETS else DATASETS["PACS"]  # a folder of images
        spec = make_spec(
            dataset,
            chosen.name,
            (0,),
            steps=given["steps"],
            hparams=parse_overrides(given["hparams"] or []),
            hparams_seed=given["hparams_seed"],
            trial_seed=given["trial_seed"],
            space=given["space"],
        )
        assert chosen.caution(spec.hparams) is None, line
        assert early_end_of(spec) is None, line


def test_a_wrong_command_line_would_be_noticed() -> None:
    command, rest = find_command(["train", "Spirals", "ERM", "--test-environment", "0"])
    with pytest.raises(AssertionError, match="--test-environment"):
        check_options(command, rest)
    with pytest.raises(Exception, match="test_env"):
        command.make_context("train", rest[:2])


# --- Links, navigation, tables


def headings(page: Path) -> set[str]:
    """The anchors of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {slugify(title.replace("`", ""), "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "code", prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(linked), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_of_the_repository_that_are_named_exist(page: Path) -> None:
    for path in re.findall(r"`((?:benchmarks|docs|examples|src|tests)/[^`\s]*)`", prose(page)):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_navigation_has_every_page() -> None:
    def leaves(item: Any) -> list[str]:
        if isinstance(item, str):
            return [item]
        return [leaf for part in (item.values() if isinstance(item, dict) else item) for leaf in leaves(part)]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(leaves(config["nav"])) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in DOCS)


def test_every_algorithm_and_dataset_is_listed_and_the_site_describes_it() -> None:
    hook = runpy.run_path(str(ROOT / "docs" / "_tables.py"))
    algorithms = {e.name: e.summary for e in ALGORITHMS.values() if e.build.__module__.startswith("sandmask.")}
    datasets = {e.name: e.description for e in DATASETS.values() if not e.name.startswith("Debug")}
    for name, described in (("algorithms.md", algorithms), ("data.md", datasets)):
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        listed = [entry for _, names in hook["GROUP"].findall(page) for entry in re.findall(r"`([^`]+)`", names)]
        assert sorted(listed) == sorted(described)
        if name == "algorithms.md":
            groups = [re.findall(r"`([^`]+)`", names) for _, names in hook["GROUP"].findall(page)]
            assert all(group == sorted(group, key=str.casefold) for group in groups)
        shown = hook["on_page_markdown"](page, types.SimpleNamespace(file=types.SimpleNamespace(src_uri=name)))
        assert all(f"| `{entry}` | {text} |" in shown for entry, text in described.items())


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("README.md", r"DomainBed's (\d+) algorithms and \[(\d+) more\]"),
        ("docs/index.md", r"Compare (\d+) methods"),
        ("docs/algorithms.md", r"`sandmask` has (\d+) methods"),
    ],
)
def test_numbers_of_methods_are_those_of_the_registry(page: str, pattern: str) -> None:
    found = re.search(pattern, (ROOT / page).read_text(encoding="utf-8"))
    own = [entry for entry in ALGORITHMS.values() if entry.build.__module__.startswith("sandmask.")]
    assert found is not None
    assert sum(map(int, found.groups())) == len(own)


@pytest.mark.parametrize(("page", "registry"), [("tables.md", RULES), ("after-a-sweep.md", MEASURES)])
def test_a_page_lists_the_rules_and_another_the_metrics(page: str, registry: Registry[Any]) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = re.search(r"(?:^\| `[\w-]+` \|.*\n)+", text, re.MULTILINE)  # the first one
    assert table is not None
    assert re.findall(r"^\| `([\w-]+)`", table[0], re.MULTILINE) == list(registry)


def imported_packages(path: Path) -> set[str]:
    """The parts of sandmask that a file imports, at the top or within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "sandmask":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sandmask."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("sandmask.")}
    return found


def test_the_map_of_the_house_is_complete_and_imports_go_one_way() -> None:
    page = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    layers = re.findall(r"^\| [a-z ]+ \| (`.*`) \|", page.split("## The map")[1], re.MULTILINE)
    order = [package for layer in layers for package in re.findall(r"`(\w+)`", layer)]
    parts = {path.stem: path for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    guest = order.pop()
    for path in [*ROOT.glob("docs/*.py"), *ROOT.glob("tests/**/*.py")]:
        assert guest in path.parts or guest not in imported_packages(path), f"{name(path)}: {guest} may be left out"
    order += [guest] if guest in parts else []
    assert sorted(order) == sorted(part for part in parts if not part.startswith("_"))
    for place, part in enumerate(order):
        for path in [parts[part]] if parts[part].is_file() else parts[part].rglob("*.py"):
            upwards = imported_packages(path) & set(order[place + 1 :])
            assert not upwards, f"{name(path)} imports {upwards}, which come after `{part}` in docs/house.md"
