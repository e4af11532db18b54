"""The pages on the paper: generated parts are those of results/paper, and typed numbers are true."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sandmask.errors import SandmaskError
from sandmask.paper._compare import RULES
from sandmask.paper._select import averages, by_rule, trial_choices, validation
from sandmask.paper._tables import is_untrained, read_all
from sandmask.paper.claims import CLAIMS, claims
from sandmask.paper.pages import MISSING, fill_page, fill_pages
from sandmask.paper.table_3 import table_3
from sandmask.paper.why_spirals import follows_spiral
from sandmask.printed import AVERAGE, printed
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.sweeps import SweepSpec, expand, read_sweep

ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "results" / "paper", ROOT / "docs"
PAGES = sorted((DOCS / "paper").glob("*.md"))


def test_blocks_are_filled_and_filled_again(tmp_path: Path) -> None:
    (tmp_path / "docs" / "paper").mkdir(parents=True)
    (tmp_path / "docs" / "images").mkdir()
    page = tmp_path / "docs" / "paper" / "x.md"
    page.write_text("a\n<!-- table t -->\nold\n<!-- end -->\nb\n<!-- picture p: words -->\n<!-- end -->\n")
    assert fill_pages(tmp_path, tmp_path / "docs") == [page]
    assert page.read_text().count(MISSING) == 2
    (tmp_path / "t.md").write_text("| x |\n")
    (tmp_path / "p.png").write_bytes(b"picture")
    fill_pages(tmp_path, tmp_path / "docs")
    picture = "<!-- picture p: words -->\n![words](../images/paper-p.png)\n<!-- end -->"
    assert page.read_text() == f"a\n<!-- table t -->\n| x |\n<!-- end -->\nb\n{picture}\n"
    assert (tmp_path / "docs" / "images" / "paper-p.png").read_bytes() == b"picture"
    assert fill_pages(tmp_path, tmp_path / "docs") == []
    with pytest.raises(SandmaskError, match="has no pages"):
        fill_pages(tmp_path, tmp_path / "elsewhere")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_what_the_results_have(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill_page(text, RESULTS, DOCS / "images") == text, "run: sandmask paper pages"


def test_what_is_written_about_figure_1_is_in_its_data() -> None:
    with (RESULTS / "figure-1.csv").open(encoding="utf-8") as file:
        rows = {(row["mask"], float(row["momentum"])): row for row in csv.DictReader(file)}
    page = (DOCS / "paper" / "findings.md").read_text(encoding="utf-8")
    for momentum in (0.0, 0.9):
        for mask in ("and-1", "sand-0", "sand-0.5", "sand-0.9"):
            assert rows[mask, momentum]["stopped"] == "791"
            assert round(100 * float(rows[mask, momentum]["dead"])) == 48
    assert "48% of the plane" in page
    assert "791 of 1,600 starts" in page
    assert "from 708 of 1,600 starts with tau = -0.5 (876 for plain averaging)" in page
    assert (rows["sand--0.5", 0.0]["spurious"], rows["erm", 0.0]["spurious"]) == ("708", "876")


def test_what_the_dead_zone_holds() -> None:
    with (RESULTS / "figure-1-ends.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if float(row["momentum"]) == 0.0]
    ends = {(row["mask"], row["x"], row["y"]): row["end"] for row in rows}
    held = [(x, y) for (mask, x, y), end in ends.items() if mask == "and-1" and end == "stopped"]
    taken = [place for place in held if ends["erm", *place] == "spurious"]
    assert (len(held), len(taken)) == (791, 766)
    page = " ".join((DOCS / "paper" / "figure-1.md").read_text(encoding="utf-8").split())
    assert "Of the 791 starts that the AND-mask's dead zone holds, plain averaging takes 766 to A's minimum" in page


def test_what_is_written_about_the_printed_tables_is_printed() -> None:
    def value(rule: str, method: str, dataset: str = "ColoredMNIST") -> float:
        cell = printed(rule, dataset, method)
        assert cell is not None
        return cell.mean

    first, second = "training-domain", "oracle"
    assert [value(first, name) for name in ("SANDMask", "ANDMask", "ERM", "ARM")] == [51.8, 51.3, 51.5, 56.2]
    assert [value(second, name) for name in ("SANDMask", "ANDMask", "ERM", "VREx", "IRM")] == [
        62.3,
        58.6,
        57.8,
        67.0,
        67.7,
    ]
    leads = [value(rule, "SANDMask") - value(rule, other) for other in ("ANDMask", "ERM") for rule in (first, second)]
    assert leads == pytest.approx([0.5, 3.7, 0.3, 4.5])
    averages = [value(rule, name, "Avg") for rule in (first, second) for name in ("SANDMask", "ANDMask")]
    assert averages == [64.6, 65.5, 67.2, 67.5]
    assert [value(first, name, "Spirals") for name in ("ANDMask", "SANDMask")] == [88.0, 49.2]


def words_of(page: str) -> str:
    return " ".join((DOCS / "paper" / page).read_text(encoding="utf-8").split())


def test_what_is_written_about_figure_2_is_in_its_data() -> None:
    with (RESULTS / "figure-2-runs.csv").open(encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    page = words_of("figure-2.md")
    assert max(float(run["test_accuracy"]) for run in runs) == pytest.approx(0.877, abs=5e-4)
    assert "of the 1,300 runs the best ends at 87.7% (an AND-mask), none reaches 90%" in page

    def trained(method: str, beta: str) -> float:
        mine = [run for run in runs if (run["panel"], run["value"], run["method"]) == ("momentum", beta, method)]
        return 100 * sum(float(run["train_accuracy"]) for run in mine) / len(mine)

    assert [round(trained(method, beta)) for method in ("ANDMask", "SANDMask") for beta in ("0.0", "0.9")] == [
        69,
        86,
        66,
        82,
    ]
    assert "the AND-mask has 69% and 86% with it, the SAND-mask 66% and 82%" in words_of("findings.md")
    assert [round(trained(name, "0.9")) for name in ("ANDMask-rescaled", "SANDMask-released")] == [62, 63]


def test_what_is_written_about_untrained_networks_is_in_the_records() -> None:
    page = words_of("tables-1-and-2.md")
    runs = read_all([RESULTS / "colored_mnist.records.parquet"])
    still = [run for run in runs if is_untrained(run)]
    assert len(still) == 12
    for run in still:
        assert (run.accuracy_in == run.accuracy_in[0]).all()
        words = [f"{100 * value:.1f}" for value in run.accuracy_in[-1]]
        (held_out,) = run.spec.test_envs
        bold = [f"**{word}**" if place == held_out == 2 else word for place, word in enumerate(words)]
        where = f"{run.spec.algorithm}; {run.env_names[held_out]}, {run.spec.trial_seed}"
        assert f"| {where} | {' | '.join(bold)} |" in page
    last = [run for run in runs if run.spec.test_envs == (2,) and not is_untrained(run)]
    ends = [100 * run.accuracy_in[-1, 2] for run in last if run.spec.algorithm not in ("IRM", "VREx")]
    assert (len(ends), f"{max(ends):.1f}") == (28, "27.8")
    assert "the highest of the 28 is an AND-mask's 27.8%" in page
    for key, pick in trial_choices(runs, by_rule("oracle")).items():
        if key.method in ("IRM", "VREx") and key.test_env == 2:
            run = pick.run
            weight = run.spec.hparams[f"{key.method.lower()}_lambda"]
            start = run.spec.hparams[f"{key.method.lower()}_penalty_anneal_iters"]
            numbers = " | ".join(f"{100 * value:.1f}" for value in run.accuracy_in[pick.index])
            assert f"| {key.method}, trial {key.trial_seed} | {weight:,.0f}, {start:.0f} | {numbers} |" in page


def test_what_is_written_about_rotated_digits_is_in_the_records() -> None:
    page = words_of("tables-1-and-2.md")
    drawn = [run for run in read_all([RESULTS / "rotated_mnist.records.parquet"]) if run.spec.hparams_seed]
    found = averages(trial_choices(drawn, by_rule("training-domain")), 6)
    word = {method: f"{average[0]:.1f}" for method, average in found.items() if average is not None}
    first = f"ERM has {word['ERM']}, VREx {word['VREx']}, IRM {word['IRM']}, the AND-mask {word['ANDMask']}"
    second = f"the released SAND-mask {word['SANDMask-released']} and the printed one {word['SANDMask']}"
    assert f"Without the first draw {first}, {second}." in page


def test_what_is_written_about_the_defaults_is_in_their_records() -> None:
    page = words_of("table-3.md")
    runs = read_all([ROOT / "results" / "spirals_defaults.records.parquet"])
    best = [int(validation(run).argmax()) for run in runs]
    found = sum(follows_spiral(run, index) for run, index in zip(runs, best, strict=True))
    assert f"Of these {len(runs)} runs {found} follow the spiral" in page
    others = [validation(run).max() for run in runs if run.spec.test_envs != (0,)]
    assert f"Of the other {len(others)}, {sum(value > 0.975 for value in others)} have over 97.5%" in page
    held_out: dict[int, list[float]] = {}
    for run, index in zip(runs, best, strict=True):
        held_out.setdefault(run.spec.trial_seed, []).append(100 * run.accuracy_in[index, run.spec.test_envs[0]])
    averages = [f"{np.mean(values):.1f}" for _, values in sorted(held_out.items())]
    assert f"held-out environments are {' and '.join(averages)}" in page


def test_what_is_written_about_leaving_the_spiral_is_in_the_records() -> None:
    page = words_of("table-3.md")
    runs = read_all([ROOT / "results" / "spirals_leaving.records.parquet"])
    losses = [run.metrics["loss"] for run in runs if run.spec.hparams_seed == 0]
    low, last = (float(np.median(values)) for values in ([x.min() for x in losses], [x[-1] for x in losses]))
    assert f"these {len(losses)} runs is {low:.3f} at the median, their last one {last:.0f}" in page
    assert f"{sum(x[-1] > np.log(2) for x in losses)} end above the 0.69 of guessing" in page

    def ends(method: str, trial: int, draw: int) -> float:
        chosen = (method, trial, draw)
        mine = [x for x in runs if (x.spec.algorithm, x.spec.trial_seed, x.spec.hparams_seed) == chosen]
        return float(np.median([run.metrics["loss"][-1] for run in mine]))

    without = [f"{ends('ANDMask', *draw):.2f}" for draw in ((1, 10), (2, 15))]
    divided = [f"{ends('ANDMask-rescaled', *draw):.1f}" for draw in ((1, 10), (2, 15))]
    assert f"end with losses of {without[0]} and {without[1]} (medians" in page
    assert f"and rescaled with {divided[0]} and {divided[1]}" in page


def test_what_is_written_about_smaller_steps_is_in_the_records() -> None:
    page = words_of("table-3.md")
    smaller = read_all([ROOT / "results" / "spirals_smaller_steps.records.parquet"])
    held_out = {run.spec.test_envs for run in smaller}
    same = [
        run
        for run in read_all([ROOT / "results" / "spirals_leaving.records.parquet"])
        if (run.spec.hparams_seed, run.spec.trial_seed) == (0, 0) and run.spec.test_envs in held_out
    ]
    assert {(run.spec.seed, run.spec.test_envs) for run in same} == {(x.spec.seed, x.spec.test_envs) for x in smaller}
    for rate in (0.01, 0.003, 0.001):
        runs = [run for run in [*same, *smaller] if run.spec.hparams["lr"] == rate]
        best = [int(validation(run).argmax()) for run in runs]
        last = [int(np.searchsorted(run.steps, 2000)) for run in runs]
        rows = []
        for chosen in (best, last):
            pairs = list(zip(runs, chosen, strict=True))
            found = sum(follows_spiral(run, index) for run, index in pairs)
            there = np.mean([100 * run.accuracy_in[index, run.spec.test_envs[0]] for run, index in pairs])
            rows.append((f"{found} of {len(runs)}", f"{there:.1f}%"))
        highest = [100 * validation(run).max() for run in runs]
        between = f"{min(highest):.1f} to {max(highest):.1f}%"
        assert f"| {rows[0][0]} | {between} | {rows[0][1]} | {rows[1][0]} | {rows[1][1]} |" in page


def test_what_is_written_about_table_3_is_in_its_cells() -> None:
    with (RESULTS / "table-3.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["environment"] != AVERAGE]

    def count(rule: str, verdict: str) -> int:
        return sum((row["selection"], row["verdict"]) == (rule, verdict) for row in rows)

    page = words_of("table-3.md")
    within, beyond = ([count(rule, verdict) for rule in RULES] for verdict in ("within", "beyond"))
    assert f"have {within[0]} of 112 cells within the joint error" in page
    assert f"and {within[1]} of 112 under the oracle; {beyond[0]} and {beyond[1]} are beyond two" in page


def test_what_is_written_about_the_spiral_is_in_the_records() -> None:
    page = words_of("table-3.md")
    runs = read_all([RESULTS / "spirals.records.parquet"])
    picks = trial_choices(runs, by_rule("training-domain"))

    def row(method: str, trial: int) -> NDArray[np.float64]:
        mine = {key.test_env: pick for key, pick in picks.items() if (key.method, key.trial_seed) == (method, trial)}
        return np.array([100 * mine[environment].test_accuracy for environment in range(16)])

    printed_rows = [row("ANDMask", trial) for trial in range(3)]
    assert [f"{values.mean():.1f}" for values in printed_rows] == ["45.8", "66.6", "73.5"]
    assert "Its three trials have 45.8, 66.6 and 73.5" in page
    rescaled_rows = [row("ANDMask-rescaled", trial) for trial in range(3)]
    words = [f"{values.mean():.1f}" for values in rescaled_rows]
    assert f"The rescaled row's trials have {words[0]}, {words[1]} and {words[2]}" in page
    gains = np.stack(rescaled_rows) - np.stack(printed_rows)
    error = gains.mean(0).std(ddof=1) / 4
    assert f"Rescaling adds {gains.mean():.1f} ± {error:.1f} to the AND-mask" in page
    trials = [f"{gain:.1f}" for gain in gains.mean(1)]
    assert f"by trial it is {trials[0]}, {trials[1]} and {trials[2]}" in page
    cells = [pick for key, pick in picks.items() if key.method == "ANDMask-rescaled" and key.test_env]
    taken = [pick for pick in cells if pick.run.spec.hparams_seed == 0]
    assert f"in {len(taken)} of the {len(cells)} cells" in page
    assert f"with {100 * min(pick.test_accuracy for pick in taken):.1f} to 100%" in page
    missed = [100 * pick.test_accuracy for pick in cells if not follows_spiral(pick.run, pick.index)]
    assert f"In {len(missed)} a network that follows signatures" in page
    assert f"{np.mean(missed):.1f}% on average" in page
    defaults = [run for run in runs if run.spec.hparams_seed == 0]
    mine = [run for run in defaults if run.spec.algorithm == "ANDMask-rescaled"]
    best = [int(validation(run).argmax()) for run in mine]
    found = sum(follows_spiral(run, index) for run, index in zip(mine, best, strict=True))
    assert f"in {found} of {len(mine)} runs: three trials" in page
    assert max(validation(run).max() for run in defaults if run.spec.algorithm == "ANDMask") < 0.75


@pytest.mark.parametrize("config", sorted(RESULTS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_sweeps_can_be_planned(config: Path) -> None:
    sweep = SweepSpec(**read_sweep(config))
    text = config.read_text(encoding="utf-8")
    assert f"sandmask sweep run runs/{config.stem} --config results/paper/{config.name}" in text
    stated = re.search(r"= ([\d,]+) runs", text)
    if stated:
        assert len(expand(sweep).runs) == int(stated[1].replace(",", ""))


def test_claims_come_from_whatever_records_there_are() -> None:
    colored = made_up_sweep(["ERM", "SANDMask"], dataset="ColoredMNIST", network="mnist-convnet")
    (product,) = claims(colored)
    assert product.name == "claim-colored-mnist"
    assert "| SANDMask - ERM | oracle |" in product.words()
    assert "+4.5" in product.words()  # the paper's 62.3 - 57.8
    extra = [
        replace(run, spec=replace(run.spec, hparams_seed=100), accuracy_in=1 - run.accuracy_in)
        for run in colored
        if run.spec.algorithm == "SANDMask" and run.spec.hparams_seed == 0
    ]
    (again,) = claims([*colored, *extra])
    assert again.words() == product.words()  # draws that only one of the two has are no part of the difference
    default = [
        replace(run, spec=replace(run.spec, hparams={"tau": 1.0 if run.spec.hparams_seed == 0 else 0.5}))
        for run in colored
    ]
    assert "| SANDMask, τ < 1 - ERM | oracle |" in claims(default)[0].words()
    failures = [
        made_up_run(
            [[0.5 + 0.1 * (beta > 0) + seed / 100, *[0.5] * 16]],
            algorithm="ANDMask",
            seed=seed,
            hparams={"adam_beta1": beta},
            options={"noise": 0.0, "init_scale": 1.0},
            dataset="Spirals",
            network="mlp",
        )
        for seed in range(6)
        for beta in (0.0, 0.9)
    ]
    made = {product.name: product.words() for product in claims(failures)}
    assert set(made) == {"claim-momentum", "claim-noise", "claim-initialization"}
    assert "| AND-mask | 52.5 | 62.5 | +10.0 | +10.0 to +10.0 |" in made["claim-momentum"]
    assert "| AND-mask | 62.5 (25%) |" in made["claim-noise"]
    with pytest.raises(SandmaskError, match="nothing to say"):
        claims([made_up_run([[0.5, 0.5]])])
    with pytest.raises(SandmaskError, match="no runs on Spirals"):
        table_3(failures)  # runs of Figure 2 are on Spirals, and not of its table
    names = set(
        re.findall(r"<!-- table (claim-[\w-]+) -->", (DOCS / "paper" / "findings.md").read_text(encoding="utf-8"))
    )
    assert names == set(CLAIMS)


def test_archives_are_small_and_readable() -> None:
    for archive in sorted(RESULTS.glob("*.records.parquet")):
        assert archive.stat().st_size < 8 * 2**20, archive
        assert read_all([archive]), archive
