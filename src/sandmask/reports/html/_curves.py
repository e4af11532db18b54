"""Curves of runs for the page: thinned, quantized, and stored in chunks that are decoded when a run is opened.

It also draws the accuracies of one run as a small SVG picture, for notebooks.
"""

import base64
import html
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandmask._text import printable
from sandmask.records import RunRecord
from sandmask.records._measures import CURVE
from sandmask.reports._for_programs import finite
from sandmask.selection import Selected, mean_over_environments

Offers = Mapping[str, Mapping[int, Selected]]  # what each rule selects in a run, by the index of the run
MISSING = 0xFFFF  # the code of a missing value
LAYER_METRIC = re.compile(r"(mask_density|dead_fraction|agreement)/(?!all(/|$)).")
LARGEST = 5_000_000  # values; they make a page of about 5 MB
RUNS_PER_CHUNK = 128
_LARGEST = 1e300  # larger values count as missing, because their differences may overflow
_WIDE = 100  # a metric whose values span more than this factor is stored on a logarithmic scale

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Detail:
    """The level of detail of a run's curves.

    `levels` is the number of steps into which accuracies are quantized (1000 for a tenth of a percent), and metrics
    between their smallest and largest value.
    """

    every_environment: bool
    every_layer: bool
    points: int
    levels: int


FULL = Detail(every_environment=True, every_layer=True, points=101, levels=10_000)
SUMMARY = Detail(every_environment=False, every_layer=False, points=61, levels=1_000)


def choose_detail(runs: Sequence[RunRecord], largest: int = LARGEST) -> Detail:
    """Choose full detail, unless the page would become too large to share."""
    values = sum(
        min(len(run.steps), FULL.points) * (2 * len(run.env_names) + len(kept_metrics(run, FULL))) for run in runs
    )
    return FULL if values <= largest else SUMMARY


def chunks(runs: Sequence[RunRecord], offers: Offers, detail: Detail) -> Iterator[str]:
    """Yield blobs with the curves of `RUNS_PER_CHUNK` runs each."""
    for begin in range(0, len(runs), RUNS_PER_CHUNK):
        headers, codes = [], []
        for place, run in enumerate(runs[begin : begin + RUNS_PER_CHUNK], start=begin):
            taken = [found[place].index for found in offers.values() if place in found]
            kept = kept_points(len(run.steps), taken, detail.points)
            curves = run_curves(run, kept, detail)
            headers.append(
                {
                    "steps": run.steps[kept].tolist(),
                    "curves": [[c.name, c.low, c.high, c.levels, int(c.log)] for c in curves],
                }
            )
            codes.append(np.stack([curve.codes for curve in curves]))
        yield codes_blob(headers, codes)


def kept_points(count: int, taken: Sequence[int], points: int) -> NDArray[np.int64]:
    """Choose at most `points` of `count` checkpoints: the first, the last, those `taken`, and evenly spaced others."""
    if count <= points:
        return np.arange(count)
    spread = np.linspace(0, count - 1, points - len(taken)).round().astype(np.int64)
    return np.union1d(spread, np.array(taken, dtype=np.int64))


@dataclass(frozen=True)
class Curve:
    """A curve and the meaning of its integer codes: 0 is `low`, and `levels` is `high`, on a log scale if `log`."""

    name: str
    values: _Floats
    low: float
    high: float
    levels: int
    log: bool = False

    @property
    def codes(self) -> NDArray[np.uint16]:
        """The values as integers. NaN and infinities are `MISSING`."""
        finite = np.isfinite(self.values)
        values = np.where(finite, self.values, self.high)
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log(values), math.log(low), math.log(high)
        scaled = np.rint((values - low) / (high - low or 1.0) * self.levels)
        coded: NDArray[np.uint16] = np.where(finite, scaled, MISSING).astype(np.uint16)
        return coded


def run_curves(run: RunRecord, kept: NDArray[np.int64], detail: Detail) -> list[Curve]:
    """Return the curves of a run's accuracies and metrics at the kept checkpoints.

    Accuracies are named `in/3` and `out/3` by split and environment. Without `every_environment`, these are the
    held-out environments, the means over training environments (`in/train`, `out/train`), and the worst (`out/worst`).
    """
    inside, outside = run.accuracy_in[kept], run.accuracy_out[kept]
    environments = range(len(run.env_names)) if detail.every_environment else run.spec.test_envs
    accuracies = {
        f"{split}/{environment}": table[:, environment]
        for environment in environments
        for split, table in (("in", inside), ("out", outside))
    }
    if not detail.every_environment and run.train_envs:
        accuracies["in/train"] = inside[:, run.train_envs].mean(axis=1)
        accuracies["out/train"] = outside[:, run.train_envs].mean(axis=1)
        accuracies["out/worst"] = outside[:, run.train_envs].min(axis=1)
    curves = [Curve(name, values, 0.0, 1.0, detail.levels) for name, values in accuracies.items()]
    return curves + [_metric(name, run.metrics[name][kept], detail.levels) for name in kept_metrics(run, detail)]


def _metric(name: str, values: _Floats, levels: int) -> Curve:
    values = np.where(np.abs(values) < _LARGEST, values, np.nan)
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Curve(name, values, 0.0, 1.0, levels)
    low, high = float(finite.min()), float(finite.max())
    return Curve(name, values, low, high, levels, log=low > 0 and high > _WIDE * low)


def kept_metrics(run: RunRecord, detail: Detail) -> list[str]:
    """Return the names of the metrics to keep. Metrics of single environments are kept for held-out ones."""
    held_out = {str(env) for env in run.spec.test_envs}

    def is_kept(name: str) -> bool:
        measure = CURVE.fullmatch(name)
        if measure is not None:
            return measure["split"] == "in" and measure["env"] in held_out
        return detail.every_layer or not LAYER_METRIC.match(name)

    return [name for name in run.metrics if is_kept(name)]


def json_blob(content: Any) -> str:
    """Encode a JSON value as a blob, with null for NaN and infinities, which browsers do not read.

    Keys and values are made printable in the same way, so values that refer to keys still match them.
    """
    safe = _printable(finite(content))
    return blob(json.dumps(safe, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): _printable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_printable(one) for one in value]
    return value


def codes_blob(header: Any, curves: Sequence[NDArray[np.uint16]]) -> str:
    """Encode curves of codes ([curves, points] each) as a blob, after a JSON header that describes them.

    The changes from point to point are stored. 0, -1, 1, -2, 2, ... are mapped to 0, 1, 2, 3, 4, ..., and all lower
    bytes come before all upper ones. Most upper bytes are then zero, which compresses well.
    """
    changes = [np.diff(codes, axis=1, prepend=np.uint16(0)).view(np.int16).ravel() for codes in curves]
    joined = np.concatenate([np.empty(0, np.int16), *changes])
    folded = ((joined << 1) ^ (joined >> 15)).astype("<u2")
    planes = folded.view(np.uint8).reshape(-1, 2).T.tobytes()
    words = json.dumps(_printable(finite(header)), allow_nan=False, separators=(",", ":")).encode()
    return blob(len(words).to_bytes(4, "little") + words + planes)


def blob(content: bytes) -> str:
    """Compress bytes to text that needs no escaping in HTML."""
    return base64.b64encode(zlib.compress(content, 9)).decode()


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 170, 42, 10, 24, 22  # size and margins of the picture
POINTS = 200  # most points of a curve
COLORS = ("#1f77b4", "#d95f02")


def curves_svg(run: RunRecord) -> str:
    """Draw validation accuracy and accuracy on held-out environments; "" for a run without evaluations."""
    if not len(run.steps):
        return ""
    kept = kept_points(len(run.steps), (), POINTS)
    held_out = ", ".join(run.env_names[env] for env in run.spec.test_envs)
    curves = {
        "validation": (run.accuracy_out, run.train_envs),
        f"held out: {held_out}": (run.accuracy_in, run.spec.test_envs),
    }
    shown = {name: mean_over_environments(table[kept][:, envs]) for name, (table, envs) in curves.items() if envs}
    last = int(run.steps[-1])
    x = LEFT + (WIDTH - LEFT - RIGHT) * run.steps[kept] / max(last, 1)
    parts = [_axes(last)]
    for place, (name, color) in enumerate(zip(shown, COLORS, strict=False)):
        parts += [
            _line(x, shown[name], color),
            _text(LEFT + 170 * place, TOP - 10, f"{name} {shown[name][-1]:.1%}", color),
        ]
    label = html.escape(f"Accuracy by step: {', '.join(f'{name} {y[-1]:.1%}' for name, y in shown.items())}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}" '
        f'font-family="sans-serif" font-size="11" fill="currentColor">{"".join(parts)}</svg>'
    )


def _height(accuracy: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - accuracy)


def _axes(last: int) -> str:
    lines = "".join(
        f'<path d="M{LEFT} {_height(y):.1f}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity=".25"/>'
        + _text(LEFT - 6, _height(y) + 4, f"{y:.0%}", anchor="end")
        for y in (0.0, 0.5, 1.0)
    )
    return lines + _text(LEFT, HEIGHT - 6, "0") + _text(WIDTH - RIGHT, HEIGHT - 6, f"step {last}", anchor="end")


def _line(x: NDArray[np.float64], accuracy: NDArray[np.float64], color: str) -> str:
    points = " ".join(f"{at:.1f},{_height(y):.1f}" for at, y in zip(x, accuracy, strict=True))
    end = f'<circle cx="{x[-1]:.1f}" cy="{_height(accuracy[-1]):.1f}" r="2.5" fill="{color}"/>'
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>{end}'


def _text(x: float, y: float, text: str, color: str = "currentColor", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{html.escape(text)}</text>'
