"""How much a SAND-mask step costs over an ERM step: ResNet-50, 3 environments of 32 images, bf16, channels last."""

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sandmask
from benchmarks._measure import alternate, print_rows

ENVS, BATCH, REPEATS = 3, 32, 30


def resnet50() -> nn.Module:
    model: nn.Module = timm.create_model("resnet50", num_classes=7)
    model = model.to("cuda", memory_format=torch.channels_last)
    sandmask.freeze_batchnorm(model)
    return model


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return F.cross_entropy(model(x), y)


def main() -> None:
    if not torch.cuda.is_available():
        print("mask_step_gpu: needs a CUDA device; skipped.")
        return
    torch.backends.cudnn.benchmark = True
    x = torch.randn(ENVS * BATCH, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 7, (ENVS * BATCH,), device="cuda")
    parts = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    erm_model, sand_model = resnet50(), resnet50()
    erm_optimizer = torch.optim.Adam(erm_model.parameters(), lr=5e-5, fused=True)
    sand_optimizer = torch.optim.Adam(sand_model.parameters(), lr=5e-5, fused=True)
    mask = sandmask.SANDMask(tau=0.5)

    def erm() -> None:
        erm_optimizer.zero_grad()
        losses(erm_model, x, y).backward()  # type: ignore[no-untyped-call]
        erm_optimizer.step()

    def sand() -> None:
        sand_optimizer.zero_grad()
        each = (losses(sand_model, *part) for part in parts)
        sandmask.backward(each, sand_model.parameters(), mask, check_finite=False)
        sand_optimizer.step()

    times = alternate({"ERM": erm, "SAND": sand}, REPEATS, warmup=8)
    row = (f"{1e3 * times['ERM']:.1f}", f"{1e3 * times['SAND']:.1f}", f"{times['SAND'] / times['ERM']:.2f}", "2.2 (fp32)")
    head = ("ERM ms", "SAND-mask ms", "ratio", "DomainBed's ratio")
    print_rows("ResNet-50, 3 x 32 images, bf16, channels last: SAND-mask step over ERM step", [head, row])


if __name__ == "__main__":
    main()
