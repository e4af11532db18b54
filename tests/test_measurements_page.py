"""The figures of docs/benchmarks.md that come from a GPU are those of the logs in results/h200."""

import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from sandmask.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
H200 = ROOT / "results" / "h200"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
Row = tuple[str, ...]


def rows(text: str) -> list[Row]:
    """The rows of a Markdown text's tables, headings included."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|")) for line in lines]


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def measured(file: str) -> list[Row]:
    return rows((H200 / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("title", "file", "n"),
    [
        ("SAND-mask step over ERM step (GPU)", "mask_step_gpu.md", 7),
        ("Mask bandwidth", "mask_bandwidth.md", 5),
        ("Peak memory", "peak_memory.md", 7),
        ("A whole training step of ResNet-50 on PACS", "image_step.md", 6),
    ],
)
def test_tables_are_those_of_the_scripts(title: str, file: str, n: int) -> None:
    shown = rows(section(title))
    assert len(shown) == n
    assert set(shown) <= set(measured(file))


def test_rates_of_stacks() -> None:
    log = (H200 / "logs" / "stacked-5.txt").read_text(encoding="utf-8")
    kept = measured("stacked.md")
    shown = rows(section("Stacks of runs"))
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        (row,) = [row for row in shown if row[0] == precision and len(row) == 7]
        assert row in kept
        assert " ".join(row) in log
    for method, precision in (("ERM", "bf16"), ("IRM", "bf16"), ("ANDMask", "tf32")):
        rate = re.search(rf"^{method} {precision} 256 ([\d,]+)", log, re.MULTILINE)
        assert rate
        assert rate[1] in section("Stacks of runs")


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_rates_of_every_algorithm() -> None:
    log = (H200 / "logs" / "stacked-6.txt").read_text(encoding="utf-8")
    kept = measured("stacked.md")
    shown = [row for row in rows(section("Stacks of runs")) if len(row) == 9][1:]
    assert {row[0] for row in shown} == set(ALGORITHMS)
    for name, *rates in shown:
        for part in (rates[:4], rates[4:]):
            assert (name, *part) in kept
            assert " ".join((name, *part)) in log
    graph = {name: number(rates[2]) / number(rates[1]) for name, *rates in shown}
    assert f"a stack is {graph['MLDG']:.1f} (MLDG) to {graph['Mixup']:.0f} times (Mixup) its run as a graph" in WORDS
    assert (min(graph, key=graph.__getitem__), max(graph, key=graph.__getitem__)) == ("MLDG", "Mixup")
    conv = {name: number(rates[6]) / number(rates[5]) for name, *rates in shown}
    looped = {name: conv.pop(name) for name in ("ARM", "CDANN", "DANN", "Fish", "IGA", "MLDG", "SagNet")}
    assert f"which makes {min(looped.values()):.2f} to {max(looped.values()):.2f} times the rate" in WORDS
    mixup = conv.pop("Mixup")
    between = f"{min(conv.values()):.1f} to {max(conv.values()):.1f}"
    assert f"is {between} times a run as a graph (Mixup {mixup:.1f}" in WORDS
    low = [(name, rates[i]) for name, *rates in shown for i in (3, 7) if number(rates[i]) < 5]
    assert low == [("IGA", "4.3")]


def test_two_passes_of_the_algorithms() -> None:
    passes = []
    for log in ("stacked-5.txt", "stacked-6.txt"):
        text = (H200 / "logs" / log).read_text(encoding="utf-8").split("\n\n# Stacks of other")[0]
        found = re.findall(r"^([A-Z][\w-]+) (\d+) [\d,]+ ([\d,]+) [\d.]+$", text, re.MULTILINE)
        passes.append({name: (number(eager), number(stack)) for name, eager, stack in found})
    pairs = [(one, passes[1][name]) for name, one in passes[0].items()]
    eager, stack = ([max(a[i] / b[i], b[i] / a[i]) for a, b in pairs] for i in (0, 1))
    assert len(pairs) == 10
    assert f"differ by factors of up to {max(eager):.1f}" in WORDS
    assert max(stack) < 1.002


def test_rates_of_drawn_shapes() -> None:
    log = (H200 / "logs" / "stacked-4.txt").read_text(encoding="utf-8")
    shape = r"\{'mlp_width': (\d+), 'mlp_depth': (\d+), 'batch_size': (\d+)(.*)\} K=16: ([\d,]+)/s = (\d+) TFLOPS"
    found = re.findall(rf"^(\w+) (\w+) S\d {shape}$", log, re.MULTILINE)
    kept = {
        (f"{method}, {precision}", f"{width}, {depth}, {batch}{', dropout' if dropout else ''}", rate, operations)
        for method, precision, width, depth, batch, dropout, rate, operations in found
    }
    shown = [row for row in rows(section("Stacks of runs")) if len(row) == 5 and row[0].endswith((", fp16", ", bf16"))]
    assert len(shown) == 8
    assert {(row[0], row[1], row[3], row[4]) for row in shown} <= kept


def test_rates_of_the_convnet() -> None:
    log = (H200 / "logs" / "stacked-6.txt").read_text(encoding="utf-8")
    kept = measured("stacked.md")
    shown = {row[0]: row for row in rows(section("Stacks of runs")) if len(row) == 5 and row in kept}
    assert " ".join(shown["fp32"]) in log
    for precision in ("tf32", "bf16"):
        _, eager, *stacks = shown[precision]
        assert re.search(rf"^{precision} eager {eager} ", log, re.MULTILINE)
        for size, rate in zip((1, 16, 44), stacks, strict=True):
            assert re.search(rf"^{precision} stack of {size} {rate} ", log, re.MULTILINE)
    evaluated = re.search(r"^bf16 with evaluation, stack of 16 ([\d,]+) ", log, re.MULTILINE)
    assert evaluated
    assert f"every 100 steps a stack of 16 makes {evaluated[1]}." in WORDS
    before = (H200 / "logs" / "convnet.txt").read_text(encoding="utf-8")
    old = [re.search(rf"^conv SAND bf16 K={size} no evaluation (\d+)$", before, re.MULTILINE) for size in (1, 16, 44)]
    assert "an earlier pass had {}, {} and {} in bf16".format(*(f"{int(each[1]):,}" for each in old if each)) in WORDS


def test_seconds_of_the_whole_table() -> None:
    log = (H200 / "logs" / "spirals-table.txt").read_text(encoding="utf-8")
    pieces = [int(piece) for piece in re.findall(r"^piece \d, .*, (\d+) s$", log, re.MULTILINE)]
    total = sum(pieces)
    assert f"It took {total:,} seconds of one H200, {total / 60:.0f} minutes" in WORDS
    assert "pieces of {}, {} and {} seconds".format(*pieces) in WORDS
    steps = 4800 * 5001
    assert f"On average that is {round(steps / total, -2):,.0f} run-steps a second" in WORDS
    assert f"the same would take {round(steps / 12 / 3600, -1):.0f} hours" in WORDS
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{total / 60:.0f} minutes" in readme


def test_seconds_of_the_second_pass() -> None:
    log = (H200 / "logs" / "spirals-second-pass.txt").read_text(encoding="utf-8")
    total = sum(int(piece) for piece in re.findall(r"^piece \d, .*, (\d+) s$", log, re.MULTILINE))
    page = " ".join((ROOT / "docs" / "paper" / "table-3.md").read_text(encoding="utf-8").split())
    assert f"1,920 runs, took {total} seconds, two sweeps at a time" in page
    assert f"took {total} seconds: {round(1920 * 5001 / total, -2):,.0f} run-steps a second" in WORDS


def test_the_fast_path_has_the_p_values_of_its_test() -> None:
    kept = measured("fast_path.md")[1:]
    shown = rows(section("The same results"))
    heading = shown[0]
    wanted = {(row[0], row[2].replace("training environments", "trained on"), row[1]): row[6] for row in kept}
    table = {
        (row[0], row[1], precision): value
        for row in shown[1:11]
        for precision, value in zip(heading[2:], row[2:], strict=True)
        if value
    }
    assert table == wanted
    assert f"Of {len(wanted)} tests, one is below 0.05" in WORDS
    assert sum(float(p) < 0.05 for p in wanted.values()) == 1


def test_swept_runs_have_the_accuracies_of_their_test() -> None:
    def short(value: str) -> str:
        return str(Decimal(value).quantize(Decimal("0.1"), ROUND_HALF_UP))

    cells: dict[str, Row] = {}
    page, first_pass = (H200 / "swept.md").read_text(encoding="utf-8").split("Of the first pass")
    assert "| SANDMask-released | fp16 | 48 | trained on | 78.85 | 77.25 | 6.66 | 0.014 |" in first_pass
    for method, precision, _, _, slow, swept, _, p in [row for row in rows(page)[1:] if len(row) == 8]:
        name = f"{method}, {precision}"
        cells[name] = (*cells.get(name, ()), f"{short(slow)}, {short(swept)}", p)
    shown = {row[0]: row[1:] for row in rows(section("The same results")) if row[0] in cells}
    assert shown == cells
    compared = [row for row in rows(page) if len(row) == 9]
    for row in compared:
        if row[2] == "held out":
            assert (row[0], *row[3:]) in rows(section("The same results"))
    (trained,) = [row for row in compared if (row[0], row[2]) == ("all", "trained on")]
    assert f"({trained[3]} swept, {trained[7]} in bfloat16)" in WORDS
    this = [row for row in measured("fast_path.md") if row[:3:2] == ("ANDMask", "training environments")]
    slow, bf16, fp16 = this[0][3], *((row[4], row[6]) for row in this if row[1] in ("bf16", "fp16"))
    row = ("this", short(slow), short(bf16[0]), bf16[1], short(fp16[0]), fp16[1])
    assert row in rows(section("The same results"))
