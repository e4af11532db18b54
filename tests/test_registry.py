from dataclasses import replace

import pytest

from sandmask.algorithms import ALGORITHMS
from sandmask.errors import SandmaskError
from sandmask.registry import closest, near

OPTIONS = ["--out", "--test-env", "--steps", "--hparam", "--seed", "--hparams-seed"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("sand", "SANDMask"),
        ("mask", "ANDMask"),
        ("SANDMsk", "SANDMask"),
        ("dro", "GroupDRO"),
        ("ERN", "ERM"),
        ("xyzzy", None),
        ("", None),
    ],
)
def test_what_a_word_most_likely_stands_for(word: str, meant: str | None) -> None:
    assert near(word, ALGORITHMS) == meant


def test_a_misspelling_is_likelier_than_a_part_of_a_longer_name() -> None:
    assert near("--dataset", ["--my-datasets-folder", "--datasat"]) == "--datasat"


def test_names_that_are_taken_or_would_be_compositions() -> None:
    for name, message in (("E-R_M", "'ERM' is taken"), ("Mine+VREx", r"must not contain '\+'")):
        with pytest.raises(SandmaskError, match=message):
            ALGORITHMS.register(replace(ALGORITHMS["ERM"], name=name))


def test_algorithms_are_listed_alphabetically_also_where_a_name_is_wrong() -> None:
    names = list(ALGORITHMS)
    assert names == sorted(names, key=str.casefold)
    assert [entry.name for entry in ALGORITHMS.values()] == names
    with pytest.raises(SandmaskError) as caught:
        ALGORITHMS["xyzzy"]
    assert f"Choose from: {', '.join(names)}." in str(caught.value)


@pytest.mark.parametrize(("word", "meant"), [("--foo", None), ("--step", "--steps"), ("--sed", "--seed")])
def test_hyphens_do_not_make_options_alike(word: str, meant: str | None) -> None:
    assert near(word, OPTIONS) == meant


def test_a_wrong_number_is_not_a_misspelling() -> None:
    choices = [str(number) for number in range(17)]
    assert near("17", choices) is None
    assert closest("17", choices).startswith("Choose from: 0, 1,")
