"""Cost of a SAND-mask step relative to an ERM step: ResNet-50, 3 environments of 32 images, bf16, channels last."""

import sys

import timm
import torch
from torch import nn
from torch.nn import functional as F

import sandmask
from benchmarks._measure import Action, alternate, print_rows

ENVS, BATCH, REPEATS = 3, 32, 30


def resnet50() -> nn.Module:
    model: nn.Module = timm.create_model("resnet50", num_classes=7)
    model = model.to("cuda").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sandmask.freeze_batchnorm(model)
    return model


def captured(action: Action) -> Action:
    """Capture an action as one CUDA graph, which the host only has to launch."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            action()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def steps(*, compiled: bool) -> dict[str, Action]:
    """Return an ERM step, and SAND-mask steps with both ways to compute the environments' gradients."""
    x = torch.randn(ENVS * BATCH, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 7, (ENVS * BATCH,), device="cuda")
    parts = list(zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True))
    mask = sandmask.SANDMask(tau=0.5)
    models = [resnet50() for _ in range(3)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=5e-5, fused=True, capturable=True) for model in models]
    forwards = [torch.compile(model) if compiled else model for model in models]

    def erm() -> None:
        optimizers[0].zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(forwards[0](x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[0].step()

    def loop() -> None:
        optimizers[1].zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            losses = (F.cross_entropy(forwards[1](inputs), labels) for inputs, labels in parts)
            sandmask.backward(losses, models[1].parameters(), mask, check_finite=False)
        optimizers[1].step()

    def one_pass() -> None:
        optimizers[2].zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            moments = sandmask.environment_moments(
                models[2], F.cross_entropy, parts, method="batched", check_finite=False
            )
        sandmask.set_gradients(models[2].named_parameters(), mask, moments)
        optimizers[2].step()

    actions: dict[str, Action] = {"ERM": erm, "one after the other": loop}
    return actions if compiled else {**actions, "one pass": one_pass}


def ratios(kind: str, actions: dict[str, Action]) -> list[tuple[str, ...]]:
    """Return a row for every kind of SAND-mask step."""
    times = alternate(actions, REPEATS, warmup=8)
    erm = times.pop("ERM")
    rows: list[tuple[str, ...]] = [
        (kind, way, f"{1e3 * erm:.1f}", f"{1e3 * t:.1f}", f"{t / erm:.2f}") for way, t in times.items()
    ]
    print(*rows, sep="\n", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    if not torch.cuda.is_available():
        print("mask_step_gpu: needs a CUDA device; skipped.")
        return
    torch.backends.cudnn.benchmark = True
    rows: list[tuple[str, ...]] = [("model", "environments' gradients", "ERM ms", "SAND-mask ms", "ratio")]
    for compiled in (False, True):
        eager = steps(compiled=compiled)
        kind = "torch.compile" if compiled else "eager"
        rows += ratios(kind, eager)
        rows += ratios(f"{kind}, captured as a CUDA graph", {name: captured(action) for name, action in eager.items()})
    print_rows(
        "ResNet-50, 3 x 32 images, bf16, channels last: SAND-mask step over ERM step (DomainBed: 2.2, fp32)", rows
    )


if __name__ == "__main__":
    main()
