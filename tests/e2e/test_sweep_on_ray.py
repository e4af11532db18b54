"""A sweep on a Ray cluster of two nodes, one of which dies in the middle."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

import sandmask
from sandmask.errors import SandmaskError
from sandmask.records import read_runs
from sandmask.records.testing import assert_same_runs
from sandmask.sweeps import JobOptions, SweepFolder, SweepSpec, expand, normalized, run_sweep
from sandmask.sweeps.executors import InlineExecutor, RayExecutor

ray = pytest.importorskip("ray")


def sweep() -> SweepSpec:
    hparams = {"mlp_width": 8, "batch_size": 8, "tau": 0.3}
    fields = {"n_hparams": 1, "n_trials": 1, "steps": 61, "checkpoint_every": 20}
    return normalized(SweepSpec(("DebugVector",), ("ERM", "SANDMask"), hparams=hparams, **fields))  # type: ignore[arg-type]


# What workers do until a node is killed: train half of the steps, then wait, so that no node is idle or finished.
PLUGIN = """
import os, time
from pathlib import Path
from sandmask.sweeps import _job
folder, train_stack = Path({!r}), _job.train_stack

def waiting(*args, on_progress, **options):
    def follow(progress):
        on_progress(progress)
        if progress.done == 30:
            (folder / f"{{os.getpid()}}.waits").touch()
        while progress.done == 30 and not (folder / "killed").exists():
            time.sleep(0.02)
    return train_stack(*args, on_progress=follow, **options)

_job.train_stack = waiting
"""


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_lost_node_costs_time_and_nothing_else(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    plain, folder = SweepFolder(tmp_path / "plain"), SweepFolder(tmp_path / "ray")
    expansion = expand(sweep())
    for each in (plain, folder):
        each.accept(sweep())
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN.format(str(tmp_path)))
    run_sweep(plain, expansion, JobOptions(str(plain.path), device="cpu"), InlineExecutor, lambda _: 3)

    soon = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}
    fair = {"worker_niceness": 0}  # Ray's workers give way to everything else: on a busy machine they stand still
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": {**soon, **fair}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    killed = tmp_path / "killed"

    def at_work() -> int:
        return len(list(tmp_path.glob("*.waits")))

    notices: list[str] = []
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        own = ray.get_runtime_context().get_node_id()  # to remove it would end Ray in this process
        sockets = {node["NodeID"]: node["RayletSocketName"] for node in ray.nodes()}
        victim = next(node for node in nodes if node.raylet_socket_name != sockets[own])

        def kill_a_node() -> None:
            until = time.monotonic() + 300
            while at_work() < 2 and time.monotonic() < until:
                time.sleep(0.02)
            cluster.remove_node(victim, allow_graceful=False)
            killed.touch()

        threading.Thread(target=kill_a_node, daemon=True).start()
        options = JobOptions(str(folder.path), device="cpu", plugins=(str(plugin),), checkpoint_seconds=0.0, carry=True)
        result = run_sweep(folder, expansion, options, RayExecutor, lambda _: 3, notices.append)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
    assert killed.exists()
    assert at_work() >= 2, "only one node had work"
    assert result.failed == {}, notices
    runs = read_runs(folder.path)
    assert {run.status for run in runs} == {"done"}
    assert_same_runs(runs, read_runs(plain.path))


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_worker_divides_its_stack_by_the_memory_of_its_own_machine(tmp_path: Path) -> None:
    plugin = tmp_path / "small_machine.py"  # as the worker sees it
    own = "from sandmask.sweeps import _job\nimport os\n"
    plugin.write_text(f"{own}if os.getpid() != {os.getpid()}:\n    _job.available_memory = lambda device: 1.0\n")
    done = sandmask.sweep(
        tmp_path / "sweep",
        datasets="DebugVector",
        algorithms="ERM",
        n_hparams=1,
        n_trials=1,
        steps=5,
        hparams={"mlp_width": 8, "batch_size": 8},
        executor="ray",
        workers=1,
        plugins=plugin,
        calibrate=False,
        progress=False,
    )
    assert (done.trained, done.failed) == (3, {})
    assert len(list((tmp_path / "sweep" / "stacks").glob("*.records.parquet"))) == 3


def test_an_address_where_nothing_listens_is_named_before_ray_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("would try for many minutes"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for form in (address, f"ray://{address}"):
            with pytest.raises(SandmaskError, match=rf"cannot be reached.*{address}.*[Rr]efused"):
                RayExecutor(form)


def test_a_port_that_cannot_be_is_named() -> None:
    with pytest.raises(SandmaskError, match="cannot be reached"):
        RayExecutor("127.0.0.1:99999")


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_workers_that_the_machine_cannot_hold_are_refused() -> None:
    with pytest.raises(SandmaskError, match=r"needs 1000 GPUs, but Ray finds \d+ here. Lower --gpus-per-worker"):
        RayExecutor(gpus=1000)
    assert not ray.is_initialized()


def test_ray_does_not_take_over_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
    before = signal.getsignal(signal.SIGTERM)
    RayExecutor()
    found = signal.signal(signal.SIGTERM, before)
    assert found is before
