"""The notes below a dataset's table: runs that compete, and rows that do not compare like the others."""

from dataclasses import replace

from sandmask.records import RunRecord
from sandmask.records.testing import made_up_run, made_up_sweep
from sandmask.reports import build_report
from sandmask.selection import method_names


def notes_of(runs: list[RunRecord]) -> tuple[str, ...]:
    notes = build_report(runs).rules[0].datasets["Toy"].notes
    return tuple(note for note in notes if not note.startswith("No run holds out"))


def test_runs_of_one_draw_that_compete_are_noted_with_the_hyperparameters_in_which_they_differ() -> None:
    loose = made_up_sweep(["ERM", "ANDMask"], hparams={"lr": 0.1, "tau": 0.5})
    strict = made_up_sweep(["ANDMask"], hparams={"lr": 0.1, "tau": 0.9})
    same_seed = [replace(run, spec=replace(run.spec, seed=0)) for run in (*loose, *strict)]
    assert notes_of(loose) == ()
    note = "runs of the same draw differ in {} and compete with each other. To compare them, report their folders "
    note += "separately, or with --against."
    assert notes_of(same_seed) == (f"ANDMask: {note.format('tau (0.5, 0.9)')}",)
    assert notes_of([*loose, *strict]) == (f"ANDMask: {note.format('seed and tau (0.5, 0.9)')}",)
    drawn = [
        made_up_run([[0.5, 0.5]], algorithm="IRM", hparams_seed=draw, hparams={"penalty": value})
        for draw in range(8)
        for value in (1.0, 2.0 + draw)
    ]
    assert notes_of(drawn) == (f"IRM: {note.format('penalty (1, 2, 3, 4, 5, 6 and 3 more)')}",)


def test_rows_with_the_same_note_share_it() -> None:
    runs = [
        made_up_run([[0.5, 0.5]], hparams={"tau": tau}, options=options)
        for tau in (0.5, 0.9)
        for options in ({}, {"average": "sma"}, {"average": "sma", "soup": "t3a"})
    ]
    noted, soups, adapted = notes_of(runs)
    assert noted.startswith("ERM, ERM + SMA: runs of the same draw differ in tau (0.5, 0.9) and compete with each")
    assert soups.startswith("ERM + SMA + T3A: models of different sweeps compete with each other. To compare them")
    assert adapted == "T3A adapts the model to unlabelled examples of the held-out environment."


def test_t3a_is_noted_also_where_the_name_has_settings() -> None:
    plain = made_up_run([[0.5, 0.5]], space="domainbed")
    adapted = made_up_run([[0.5, 0.5]], space="paper", options={"soup": "t3a"})
    assert set(method_names([plain, adapted]).values()) == {"ERM (space=domainbed)", "ERM + T3A (space=paper)"}
    assert notes_of([plain, adapted]) == ("T3A adapts the model to unlabelled examples of the held-out environment.",)
