"""Figure 1: dead zones in a landscape of two environments, drawn and counted.

The paper's panels, and what they do not show: the share of the plane without any update, where descent ends from a grid
of starts, and which changes to equation 2 would remove the dead zones that it leaves (with two environments, every tau
of 0 or more leaves all of the AND-mask's).
"""

from collections.abc import Mapping

import pandas as pd
import torch
from torch import Tensor

from sandmask.paper._landscape import (
    ENDS,
    Masking,
    and_masking,
    classify,
    dead_zone,
    descend,
    gradients,
    grid,
    minima,
    sand_masking,
)
from sandmask.paper._landscape_drawing import draw_changes, draw_landscape
from sandmask.paper._product import Product, Report, silent
from sandmask.reports import Grid

TITLE = "Figure 1: the landscape of two environments"
MOMENTA = (0.0, 0.9)
LEARNING_RATE = 0.05
SHOWN_TAU = 0.5  # of the SAND-mask's panels; any other in [0, 1) has the same dead zones


def maskings() -> tuple[Masking, ...]:
    """The masks that are measured: the average, both masks as printed, and changes without dead zones."""
    return (
        and_masking(0.0),
        and_masking(1.0),
        *(sand_masking(tau) for tau in (0.0, 0.5, 0.9)),
        *(sand_masking(tau) for tau in (-0.1, -0.5, -1.0)),
        *(sand_masking(tau, sharpness) for tau, sharpness in ((0.0, 1.0), (0.0, 5.0), (0.5, 5.0))),
    )


DRAWN = ("erm", "and-1", "sand-0.5", "sand--0.5", "sand-0-smooth-5", "sand-0.5-smooth-5")


def _ends(starts: Tensor, steps: int, report: Report) -> dict[tuple[str, float], Tensor]:
    """The end of every descent, by mask and momentum."""
    places = minima()
    jobs = [(masking, momentum) for masking in maskings() for momentum in MOMENTA]
    kinds = {}
    for number, (masking, momentum) in enumerate(jobs):
        report(f"{masking.label}, momentum {momentum:g}", number, len(jobs))
        ends = descend(masking, starts, momentum, steps, LEARNING_RATE)
        kinds[masking.name, momentum] = classify(ends, masking, places)
    report("descents", len(jobs), len(jobs))
    return kinds


def measure(kinds: Mapping[tuple[str, float], Tensor], resolution: int) -> pd.DataFrame:
    """A row for each mask and momentum: shares of the plane, and how many of the starts end where."""
    rows = []
    for masking in maskings():
        zone = dead_zone(masking, resolution)
        for momentum in MOMENTA:
            found = kinds[masking.name, momentum]
            counts = {name: int((found == number).sum()) for number, name in enumerate(ENDS)}
            rows.append(
                {
                    "mask": masking.name,
                    "label": masking.label,
                    "as_printed": masking.as_printed,
                    "dead": zone.dead,
                    "partly_dead": zone.partly,
                    "slow": zone.slow,
                    "momentum": momentum,
                    "starts": found.numel(),
                    **counts,
                }
            )
    return pd.DataFrame(rows)


def _grid(data: pd.DataFrame, steps: int) -> Grid:
    rows = []
    for masking in maskings():
        still, moved = data[data["mask"] == masking.name].to_dict("records")
        shares = [f"{100 * still[name]:.1f}%" for name in ("dead", "partly_dead", "slow")]
        counts = [f"{still[name]}, {moved[name]}" for name in ENDS]
        name = masking.label.replace("-mask", "").replace("sign → ", "")
        rows.append((name, *shares, *counts))
    header = ("mask", "dead", "partly dead", "slow", "shared", "spurious", "stopped", "elsewhere")
    shares_note = "Shares of the plane: no update; one of two elements is zero; under 1% of the average gradient."
    ends_note = (
        f"Ends of gradient descent from {data.starts.iloc[0]} starts, {steps} steps, learning rate {LEARNING_RATE:g}, "
        "with momentum 0 and 0.9: at the shared minimum, at that of A alone, stopped in a dead zone, or neither."
    )
    return Grid(TITLE, header, tuple(rows), (shares_note, ends_note))


def figure_1(*, quick: bool = False, report: Report = silent) -> Product:
    """The whole of Figure 1: pictures and counts. `quick` takes a quarter of the starts and fewer steps."""
    side, steps, resolution = (20, 1000, 201) if quick else (40, 4000, 801)
    starts = grid(side).reshape(-1, 2)
    kinds = _ends(starts, steps, report)
    data = measure(kinds, resolution)
    by_name = {masking.name: masking for masking in maskings()}
    figures = {
        "figure-1": draw_landscape(by_name["erm"], by_name["and-1"], by_name[f"sand-{SHOWN_TAU:g}"]),
        "figure-1-changes": draw_changes([by_name[name] for name in DRAWN], starts, kinds, MOMENTA),
    }
    ends = [
        {"mask": mask, "momentum": momentum, "x": round(float(x), 3), "y": round(float(y), 3), "end": ENDS[int(kind)]}
        for (mask, momentum), found in kinds.items()
        for (x, y), kind in zip(starts, found, strict=True)
    ]
    summary = {row["mask"]: {"dead": row["dead"], "slow": row["slow"]} for row in data.to_dict("records")}
    tables = {"figure-1": data, "figure-1-ends": pd.DataFrame(ends)}
    return Product("figure-1", TITLE, figures, tables, (_grid(data, steps),), {"steps": steps, "dead_zones": summary})


def dead_zones_contain(tau_and: float, tau_sand: float, resolution: int = 401) -> bool:
    """Whether everything that the AND-mask zeroes is zero under the SAND-mask too, element by element, on a grid."""
    grads = gradients(grid(resolution))
    and_zero = and_masking(tau_and).weights(grads) == 0
    sand_zero = sand_masking(tau_sand).weights(grads) == 0
    return bool(torch.all(sand_zero | ~and_zero))
