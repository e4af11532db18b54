"""The command that trains a run again."""

import shlex

from sandmask.records import RunRecord, RunSpec

_NUMBERS = ("steps", "checkpoint_every", "hparams_seed", "trial_seed", "seed")


def run_command(run: RunRecord | RunSpec) -> str:
    """The `sandmask train` command with which this run is trained again, to copy into a shell; "" for a soup.

    It names every setting and hyperparameter, so that it does not depend on defaults.

    :param run: a record, or its spec.
    """
    spec, names = (run.spec, run.env_names) if isinstance(run, RunRecord) else (run, ())
    if "soup" in spec.options:
        return ""
    words = ["sandmask", "train", spec.dataset, spec.algorithm]
    for env in spec.test_envs:
        words += ["--test-env", names[env] if names else str(env)]
    for name in _NUMBERS:
        words += [f"--{name.replace('_', '-')}", str(getattr(spec, name))]
    words += ["--space", spec.space, "--network", spec.network, "--precision", spec.precision]
    if spec.weights != "pretrained" and spec.network not in ("mlp", "mnist-convnet"):
        words += ["--weights", spec.weights]
    averages = spec.options.get("averages") or spec.options.get("average")
    words += ["--average", str(averages)] if averages else []
    words += ["--shared-init"] if spec.options.get("init") == "shared" else []
    for name, value in spec.hparams.items():
        words += ["--hparam", f"{name}={value!r}"]
    return shlex.join(words)
