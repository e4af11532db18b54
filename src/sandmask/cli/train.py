"""`sandmask train`: one run, from a spec to records and a model."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask._text import printable
from sandmask.cli import _completion
from sandmask.cli._console import print_json, print_table
from sandmask.cli._inventory import announce, check_images
from sandmask.cli._options import (
    CheckpointEveryOption,
    CheckpointSecondsOption,
    CompileOption,
    DataDirOption,
    DeviceOption,
    DiagnosticsOption,
    FastOption,
    HparamOption,
    HparamsSeedOption,
    JsonOption,
    MissingClassesOption,
    NetworkOption,
    PluginOption,
    PrecisionOption,
    SeedOption,
    SkipCorruptOption,
    SpaceOption,
    StepsOption,
    TensorBoardOption,
    TrialSeedOption,
    WeightsOption,
    allowances,
)
from sandmask.cli._progress import TrainingBar

if TYPE_CHECKING:
    from sandmask.records import RunRecord


def train(
    dataset: Annotated[
        str,
        typer.Argument(
            help="A dataset, or the folder of your own: root/domain/class/*.jpg", autocompletion=_completion.dataset
        ),
    ],
    algorithm: Annotated[
        str,
        typer.Argument(help="An algorithm, as in: sandmask list algorithms", autocompletion=_completion.algorithm),
    ],
    test_env: Annotated[
        list[str],
        typer.Option("--test-env", metavar="E", help="Environment to hold out, by name or number. Repeatable."),
    ],
    steps: StepsOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    hparam: HparamOption = None,
    hparams_seed: HparamsSeedOption = 0,
    trial_seed: TrialSeedOption = 0,
    seed: SeedOption = 0,
    space: SpaceOption = "paper",
    network: NetworkOption = None,
    weights: WeightsOption = None,
    precision: PrecisionOption = "fp32",
    compiled: CompileOption = False,
    fast: FastOption = True,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
    skip_corrupt: SkipCorruptOption = False,
    allow_missing_classes: MissingClassesOption = False,
    checkpoint_seconds: CheckpointSecondsOption = 30,
    diagnostics: DiagnosticsOption = False,
    tensorboard: TensorBoardOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME-ID if not given.")] = None,
    json: JsonOption = False,
    plugin: PluginOption = None,
) -> None:
    """Train ALGORITHM on DATASET with one or more environments held out, and say how well it does on them.

    Interrupted or killed, the same command goes on where it stopped, with the same result to the last bit. The run's
    folder holds records.jsonl (sandmask report reads it) and model.safetensors.

    [bold]Examples[/bold]

    sandmask train Spirals ANDMask --test-env 0 --steps 300 --hparam tau=0.5

    sandmask train PACS SANDMask --test-env sketch --hparam tau=0.5 --precision bf16

    sandmask train ./my_images ERM --test-env hospital_3 --network resnet18 --weights resnet18.safetensors
    """
    from sandmask.algorithms import ALGORITHMS
    from sandmask.datasets import dataset_entry, load_dataset, resolve_environment
    from sandmask.hparams import parse_overrides
    from sandmask.plugins import load_plugins
    from sandmask.training import RunFolder, choose_device, make_spec

    load_plugins(plugin)
    entry = dataset_entry(dataset)
    allowed = allowances(skip_corrupt=skip_corrupt, allow_missing_classes=allow_missing_classes)
    data = load_dataset(entry, data_dir, **dict.fromkeys(allowed, True))
    spec = make_spec(
        entry,
        algorithm,
        [resolve_environment(data, env) for env in test_env],
        steps=steps,
        checkpoint_every=checkpoint_every,
        hparams=parse_overrides(hparam or []),
        hparams_seed=hparams_seed,
        trial_seed=trial_seed,
        seed=seed,
        space=space,
        network=network,
        weights=weights,
        precision=precision,
    )
    if (caution := ALGORITHMS[spec.algorithm].caution(spec.hparams)) is not None:
        typer.echo(f"warning: {caution}", err=True)
    folder = RunFolder(out or Path("runs") / spec.folder_name)
    if folder.finished(spec) and (tensorboard is not None or diagnostics):
        typer.echo("note: this run is finished, and stays as it is. To train it again, give another --out.", err=True)
    if not json:
        announce(data, partial(typer.echo, err=True))
    if not folder.finished(spec):
        check_images(data, keep=True, quiet=json)
    with TrainingBar(spec, folder.path, quiet=json) as bar:
        record = folder.train(
            spec,
            data,
            choose_device(device),
            weights=weights,
            compiled=compiled,
            fast=fast,
            diagnostics=diagnostics,
            tensorboard=tensorboard,
            report=bar.update,
            checkpoint_seconds=checkpoint_seconds,
        )
    if json:
        print_json(_summary(record, folder.path))
    else:
        _print(record, folder.path)


def _summary(record: "RunRecord", path: Path) -> dict[str, object]:
    summary: dict[str, object] = {
        "run": record.spec.id,
        "folder": str(path),
        "status": record.status,
        "diverged_at": record.diverged_at,
        "spec": record.spec.to_json(),
    }
    if not len(record.steps):  # diverged before the first evaluation
        return {**summary, "step": None, "accuracy": {}}
    last = record.accuracy_in[-1], record.accuracy_out[-1]
    accuracy = {
        name: {"in": float(i), "out": float(o), "held_out": e in record.spec.test_envs}
        for e, (name, i, o) in enumerate(zip(record.env_names, *last, strict=True))
    }
    return {**summary, "step": int(record.steps[-1]), "accuracy": accuracy}


def _print(record: "RunRecord", path: Path) -> None:
    spec = record.spec
    if record.status == "diverged":
        typer.echo(f"diverged at step {record.diverged_at}: the loss was no number. Try a smaller --hparam lr=...")
    if len(record.steps):
        rows = [
            (name, "held out" if e in spec.test_envs else "trained on", f"{i:.1%}", f"{o:.1%}")
            for e, (name, i, o) in enumerate(
                zip(record.env_names, record.accuracy_in[-1], record.accuracy_out[-1], strict=True)
            )
        ]
        title = f"{spec.algorithm} on {spec.dataset}, after step {record.steps[-1]}"
        print_table(title, ("environment", "", "in (80%)", "out (20%)"), rows)
    typer.echo(f"records and model: {printable(str(path))}")
