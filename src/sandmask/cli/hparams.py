"""`sandmask hparams`: the hyperparameters of a seed."""

from collections.abc import Mapping
from typing import Annotated

import typer

from sandmask.cli import _completion, _options
from sandmask.cli._completion import check_names, put_in_order
from sandmask.cli._console import print_json, print_table
from sandmask.hparams import DEFAULT_SPACE, Space, parse_overrides, resolve, space_for
from sandmask.plugins import load_plugins


def hparams(
    algorithm: Annotated[
        str,
        typer.Argument(help="An algorithm; see: sandmask list algorithms", autocompletion=_completion.algorithm),
    ],
    dataset: Annotated[
        str,
        typer.Argument(
            help="A dataset, or your own data; see: sandmask list datasets",
            autocompletion=_completion.dataset,
        ),
    ],
    hparams_seed: _options.HparamsSeedOption = 0,
    trial_seed: _options.TrialSeedOption = 0,
    space: _options.SpaceOption = DEFAULT_SPACE,
    hparam: _options.HparamOption = None,
    json: _options.JsonOption = False,
    plugin: _options.PluginOption = None,
) -> None:
    """Print the hyperparameters of ALGORITHM on DATASET: the values of a seed, the defaults and the ranges.

    With --space domainbed, the random draws equal DomainBed's bit for bit.

    [bold]Examples[/bold]

    sandmask hparams SANDMask PACS

    sandmask hparams IRM ColoredMNIST --hparams-seed 7 --trial-seed 1

    sandmask hparams ANDMask Spirals --space domainbed --hparam lr=0.001 --json
    """
    dataset, algorithm = put_in_order(dataset, algorithm, "`sandmask hparams` takes the algorithm first.")
    check_names(dataset, algorithm, plugin)
    from sandmask.algorithms import ALGORITHMS  # after the check, which does not need torch
    from sandmask.datasets import dataset_entry

    load_plugins(plugin)
    method, data = ALGORITHMS[algorithm], dataset_entry(dataset)
    found = space_for(data.scope, data.name, method.name, method.hparams, space)
    values = resolve(found, hparams_seed, trial_seed, parse_overrides(hparam or []))
    if json:
        print_json(values)
    else:
        _print(found, values)


def _print(space: Space, values: Mapping[str, float]) -> None:
    rows = [(name, f"{values[name]:g}", f"{row.default:g}", str(row.draw)) for name, row in space.items()]
    print_table(space.title, ("name", "value", "default", "drawn from"), rows)
