"""The tables in results/h200, which docs/benchmarks.md summarizes, equal the logs beside them.

That the page equals the tables is tested with the other generated blocks, in tests/paper/test_paper_pages.py.
"""

import re
from pathlib import Path

import pytest

from sandmask.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
H200 = ROOT / "results" / "h200"
STEPS = 5001
Row = tuple[str, ...]


def rows(text: str) -> list[Row]:
    """The rows of a Markdown text's tables, headings included."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def table(file: str, heading: str) -> list[Row]:
    """The rows of one section, without the heading's."""
    found = re.search(rf"^##+ {re.escape(heading)}.*?$(.*?)(?=^##+ |\Z)", read(file), re.MULTILINE | re.DOTALL)
    assert found, heading
    return rows(found[1])[1:]


def read(file: str) -> str:
    return (H200 / file).read_text(encoding="utf-8")


def stated(section: str, row: str) -> str:
    """The value in the README."""
    (value,) = [cells[-1] for cells in table("README.md", section) if cells[0] == row]
    return value


def number(text: str) -> float:
    return float(text.replace(",", ""))


def pieces(log: str) -> list[int]:
    return [int(piece) for piece in re.findall(r"^piece \d, .*, (\d+) s$", read(f"logs/{log}"), re.MULTILINE)]


def test_rates_of_stacks() -> None:
    log = read("logs/stacked-5.txt")
    shown = table("stacked.md", "Spirals, SAND-mask")
    assert [row[0] for row in shown] == ["fp32", "tf32", "bf16", "fp16"]
    assert all(" ".join(row) in log for row in shown)


@pytest.mark.parametrize("heading", ["Spirals, batch_size 128", "ColoredMNIST, batch_size 64, bf16"])
def test_rates_of_every_algorithm(heading: str) -> None:
    shown = table("stacked.md", heading)
    assert len(shown) == 22  # of the time of the measurement
    assert {row[0] for row in shown} <= set(ALGORITHMS)
    assert all(" ".join(row) in read("logs/stacked-6.txt") for row in shown)


def test_gains_of_stacks() -> None:
    spirals, conv = (
        {row[0]: number(row[3]) / number(row[2]) for row in table("stacked.md", heading)}
        for heading in ("Spirals, batch_size 128", "ColoredMNIST, batch_size 64, bf16")
    )
    for name, new, before in table("stacked.md", "Algorithms on ColoredMNIST"):
        if name in conv:  # the stack was measured again; one run was not
            conv[name] *= number(new) / number(before)
    iga, mixup = conv.pop("IGA"), conv.pop("Mixup")
    wanted = {
        "Spirals: smallest stack of 64 over one run": f"{min(spirals.values()):.1f}",
        "Spirals: largest stack of 64 over one run": f"{max(spirals.values()):.0f}",
        "ConvNet with kernels: smallest stack of 16 over one run": f"{min(conv.values()):.1f}",
        "ConvNet with kernels: largest stack of 16 over one run": f"{max(conv.values()):.1f}",
        "ConvNet: Mixup": f"{mixup:.1f}",
        "ConvNet: IGA, over one run before it had kernels": f"{iga:.1f}",
    }
    assert {name: stated("All algorithms", name) for name in wanted} == wanted


def test_two_passes_of_the_algorithms() -> None:
    passes = []
    for log in ("stacked-5.txt", "stacked-6.txt"):
        text = read(f"logs/{log}").split("\n\n# Stacks of other")[0]
        found = re.findall(r"^([A-Z][\w-]+) (\d+) [\d,]+ ([\d,]+) [\d.]+$", text, re.MULTILINE)
        passes.append({name: (number(eager), number(stack)) for name, eager, stack in found})
    pairs = [(one, passes[1][name]) for name, one in passes[0].items()]
    eager, stack = ([max(a[i] / b[i], b[i] / a[i]) for a, b in pairs] for i in (0, 1))
    assert len(pairs) == 10
    assert stated("All algorithms", "largest factor between two eager readings") == f"{max(eager):.1f}"
    assert max(stack) < 1.002


def test_rates_of_drawn_shapes() -> None:
    shape = r"\{'mlp_width': (\d+), 'mlp_depth': (\d+), 'batch_size': (\d+)(.*)\} K=16: ([\d,]+)/s = (\d+) TFLOPS"
    found = re.findall(rf"^(\w+) (\w+) S\d {shape}$", read("logs/stacked-4.txt"), re.MULTILINE)
    kept = {
        (f"{method}, {precision}", f"{width}, {depth}, {batch}{', dropout' if dropout else ''}", rate, operations)
        for method, precision, width, depth, batch, dropout, rate, operations in found
    }
    shown = [row for row in rows(read("README.md")) if row[0].endswith((", fp16", ", bf16"))]
    assert len(shown) == 8
    assert {(row[0], row[1], row[3], row[4]) for row in shown} <= kept


def test_rates_of_the_convnet() -> None:
    log = read("logs/stacked-6.txt")
    full, *reduced = table("stacked.md", "ColoredMNIST, SANDMask")
    assert " ".join(full) in log
    for precision, eager, *stacks in reduced:
        assert re.search(rf"^{precision} eager {eager} ", log, re.MULTILINE)
        for size, rate in zip((1, 16, 44), stacks, strict=True):
            assert re.search(rf"^{precision} stack of {size} {rate} ", log, re.MULTILINE)


def test_precisions_side_by_side() -> None:
    narrow, tiles = (read(f"logs/{name}.txt").splitlines() for name in ("spirals-narrow", "tiles"))
    shown = {row[0]: " ".join(row) for row in table("stacked.md", "Precisions side by side")}
    assert shown["tf32"] in narrow
    assert shown["fp32"] in tiles
    assert shown["fp32x3"] in tiles


def test_readings_of_images() -> None:
    log = read("logs/range.txt")
    images = table("image_step.md", "ResNet-50, PACS")
    assert len(images) == 2
    assert all(" ".join(row) in log for row in images)


def test_present_rates_of_the_convnet() -> None:
    log = read("logs/tiles.txt").splitlines()
    rates = {name: rate for name, rate, _ in table("stacked.md", "Algorithms on ColoredMNIST")}
    assert len(rates) == 9
    assert all(f"{name} {rate} " in log for name, rate in rates.items() if name not in ("Fishr", "SAGM"))
    evaluated = table("stacked.md", "With evaluations")
    assert len(evaluated) == 2
    assert all(any(line.startswith(f"bf16 {' '.join(rates)} ") for line in log) for _, *rates in evaluated)


def test_seconds_of_the_whole_table() -> None:
    first, second = pieces("spirals-table.txt"), pieces("spirals-second-pass.txt")
    total = sum(first)
    wanted = {
        "seconds": f"{total:,}",
        "minutes": f"{total / 60:.0f}",
        "seconds of the three pieces": "{}, {} and {}".format(*first),
        "run-steps per second": f"{round(4800 * STEPS / total, -2):,.0f}",
        "hours at 12 run-steps per second": f"{round(4800 * STEPS / 12 / 3600, -1):.0f}",
        "seconds of the second pass": f"{sum(second)}",
        "run-steps per second of the second pass": f"{round(1920 * STEPS / sum(second), -2):,.0f}",
    }
    assert {name: stated("The whole Spirals table", name) for name in wanted} == wanted


def test_peak_memory_grows_as_stated() -> None:
    together = {row[0]: number(row[3]) for row in rows(read("peak_memory.md"))[1:] if row[1].startswith("all")}
    assert stated("Peak memory", "growth from 2 to 16 environments") == f"{together['16'] / together['2'] - 1:.0%}"


def test_p_values_of_the_fast_path() -> None:
    fast = [float(row[6]) for row in rows(read("fast_path.md"))[1:]]
    own = read("swept.md").split("### Minus")[0]
    swept = [float(row[7]) for row in rows(own)[1:]]
    counts = [len(fast), sum(p < 0.05 for p in fast), len(swept), sum(p < 0.05 for p in swept)]
    names = ("tests", "p below 0.05", "tests of swept runs", "swept runs, p below 0.05")
    assert [stated("Tests of the fast path", name) for name in names] == [str(count) for count in counts]
