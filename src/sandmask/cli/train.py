"""`sandmask train`: one run, from a spec to records and a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandmask._signals import sigterm_raises
from sandmask._text import printable
from sandmask.cli import _completion
from sandmask.cli._console import print_json, print_table, tell
from sandmask.cli._inventory import announce, check_images
from sandmask.cli._names import check_names
from sandmask.cli._options import (
    AverageOption,
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
    listed,
)
from sandmask.cli._progress import TrainingBar
from sandmask.hparams import DEFAULT_SPACE

if TYPE_CHECKING:
    from sandmask.records import RunRecord, RunSpec
    from sandmask.training import RunFolder

DIVERGED = 3  # the exit status of a run whose loss became NaN or infinite


def train(
    dataset: Annotated[
        str,
        typer.Argument(
            help="A dataset, or a folder of images: root/domain/class/*.jpg", autocompletion=_completion.dataset
        ),
    ],
    algorithm: Annotated[
        str,
        typer.Argument(help="An algorithm; see: sandmask list algorithms", autocompletion=_completion.algorithm),
    ],
    test_env: Annotated[
        list[str],
        typer.Option("--test-env", metavar="E", help="Environment to hold out, as a name or a number. Repeatable."),
    ],
    steps: StepsOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    hparam: HparamOption = None,
    hparams_seed: HparamsSeedOption = 0,
    trial_seed: TrialSeedOption = 0,
    seed: SeedOption = 0,
    space: SpaceOption = DEFAULT_SPACE,
    network: NetworkOption = None,
    weights: WeightsOption = None,
    precision: PrecisionOption = "fp32",
    average: AverageOption = None,
    compiled: CompileOption = False,
    fast: FastOption = True,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
    skip_corrupt: SkipCorruptOption = False,
    allow_missing_classes: MissingClassesOption = False,
    checkpoint_seconds: CheckpointSecondsOption = 30,
    keep_checkpoint: Annotated[
        bool,
        typer.Option(
            "--keep-checkpoint", help="Keep the last checkpoint, so that the run can be given more --steps later."
        ),
    ] = False,
    diagnostics: DiagnosticsOption = False,
    tensorboard: TensorBoardOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/NAME-ID")] = None,
    json: JsonOption = False,
    plugin: PluginOption = None,
) -> None:
    """Train ALGORITHM on DATASET with one or more environments held out, and print the accuracy on each environment.

    Ctrl-C and SIGTERM save a checkpoint and stop. Rerun the same command to continue; the result is the same as without
    the interruption. The folder of the run holds records.jsonl, which sandmask report reads, and model.safetensors.

    With --keep-checkpoint, a finished run can be given more steps: repeat the command with the same --out and a larger
    --steps. The result is the same as if the run had been started with that number of steps.

    The exit status is 0 if the run is done, 3 if it diverged (its loss became NaN or infinite), 2 for a mistake in the
    command, 130 after Ctrl-C and 143 after SIGTERM.

    [bold]Examples[/bold]

    sandmask train Spirals ANDMask --test-env 0 --steps 300 --hparam tau=0.5

    sandmask train PACS SANDMask --test-env sketch --hparam tau=0.5 --precision bf16

    sandmask train ./my_images ERM --test-env hospital_3 --network resnet18 --weights resnet18.safetensors
    """
    check_names(dataset, algorithm, plugin)
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
        averages=listed(average),
    )
    if (caution := ALGORITHMS[spec.algorithm].caution(spec.hparams)) is not None:
        tell(f"warning: {caution}")
    folder = RunFolder(out or Path("runs") / spec.folder_name)
    _say_what_is_there(folder, spec, extras=tensorboard is not None or diagnostics)
    if not json:
        announce(data, tell)
    if not folder.finished(spec):
        check_images(data, keep=True, quiet=json)
    with sigterm_raises(), TrainingBar(spec, folder.path, quiet=json) as bar:
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
            evaluating=bar.evaluating,
            keep_checkpoint=keep_checkpoint,
            checkpoint_seconds=checkpoint_seconds,
        )
    if json:
        print_json(_summary(record, folder.path))
    else:
        _print(record, folder.path)
    if record.status == "diverged":
        raise typer.Exit(DIVERGED)


def _say_what_is_there(folder: "RunFolder", spec: "RunSpec", *, extras: bool) -> None:
    """Print a note if the run was trained before and is not simply finished."""
    from sandmask.training.folder import RECORDS

    if not folder.has_model(spec):
        return
    if not folder.finished(spec):
        tell(f"note: {folder.path / RECORDS} is damaged: lines of this finished run are missing. Training it again.")
    elif extras:
        tell("note: this run is finished and is not changed. To train it again, choose another --out.")


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
        tell(f"Diverged at step {record.diverged_at}: the loss is NaN or infinite. Try a smaller --hparam lr=...")
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
