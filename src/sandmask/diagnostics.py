"""Log what a mask does in your own training loop: to TensorBoard, to a CSV file, or in memory.

A `MaskLogger` is a callback of `sandmask.backward`:

>>> import torch, sandmask
>>> from sandmask.diagnostics import MaskLogger
>>> w = torch.ones(2, requires_grad=True)
>>> logger = MaskLogger(every=2)
>>> for _ in range(3):
...     losses = [w.sum(), w[0] - w[1]]
...     _ = sandmask.backward(losses, [("w", w)], sandmask.ANDMask(tau=1.0), on_report=logger)
>>> [(row["step"], row["mask_density/w"]) for row in logger.rows]
[(0, 0.5), (2, 0.5)]

The names are those of `sandmask train --diagnostics`: `mask_density/<tensor>`, `dead_fraction/<tensor>` and
`agreement/<tensor>/<bin>`; the tensor `all` stands for all tensors together.
"""

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sandmask.errors import SandmaskError
from sandmask.gradients import MaskReport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["MaskLogger", "open_tensorboard", "report_figures"]


def report_figures(report: MaskReport, bins: int = 10, *, per_tensor: bool = True) -> dict[str, float]:
    """Return the numbers of a report by name, as `MaskLogger` writes them. Waits for the device.

    :param report: what `sandmask.backward` returned.
    :param bins: number of bins of the histograms of agreement.
    :param per_tensor: include each tensor, not only `all` together.
    """
    summaries = {**(report.per_tensor if per_tensor else {}), "all": report.total}
    figures: dict[str, float] = {}
    for name, summary in summaries.items():
        histogram = report.agreement_histogram(bins, None if name == "all" else name)
        figures[f"mask_density/{name}"] = summary.density
        figures[f"dead_fraction/{name}"] = summary.dead_fraction
        figures |= {f"agreement/{name}/{number}": share for number, share in enumerate(histogram)}
    return figures


def open_tensorboard(folder: str | os.PathLike[str], purge_step: int | None = None) -> "SummaryWriter":
    """Open a writer of TensorBoard's event files.

    :param folder: folder for the files.
    :param purge_step: hide the values of earlier files from this step on.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SandmaskError(
            "Writing for TensorBoard needs the tensorboard package. Install it: pip install 'sandmask[tensorboard]'"
        ) from error
    return SummaryWriter(str(folder), purge_step=purge_step)


class MaskLogger:
    """A callback for `sandmask.backward(..., on_report=logger)` that writes reports.

    Reading a report waits for the device and takes about as long as the mask itself. Reports that are not written are
    not read.

    :param tensorboard: a folder for event files; needs the extra `tensorboard`.
    :param csv: a file to append lines `step,name,value` to.
    :param every: write only the reports of steps whose number is a multiple of `every`.
    :param bins: number of bins of the histograms of agreement.
    :param per_tensor: also write the figures of each tensor, not only those of `all`.
    :param start: number of the first step, if training is resumed.
    """

    def __init__(
        self,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        csv: str | os.PathLike[str] | None = None,
        every: int = 1,
        bins: int = 10,
        per_tensor: bool = True,
        start: int = 0,
    ) -> None:
        if every < 1:
            raise SandmaskError(f"Parameter `every` should be at least 1. Found `every` = {every}.")
        self.every, self.bins, self.per_tensor = every, bins, per_tensor
        self.step = start
        self.rows: list[dict[str, float]] = []
        """The written reports, if neither a CSV file nor TensorBoard was given."""
        self._writer = None if tensorboard is None else open_tensorboard(tensorboard, purge_step=start or None)
        self._table: Path | None = None if csv is None else Path(csv)

    def __call__(self, report: MaskReport) -> None:
        """Count a step, and write its report if its number is a multiple of `every`."""
        if self.step % self.every == 0:
            self._write(report_figures(report, self.bins, per_tensor=self.per_tensor))
        self.step += 1

    def _write(self, figures: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, self.step)
        if self._table is not None:
            self._table.parent.mkdir(parents=True, exist_ok=True)
            with self._table.open("a", newline="", encoding="utf-8") as file:
                table = csv.writer(file)
                if file.tell() == 0:
                    table.writerow(["step", "name", "value"])
                table.writerows([self.step, name, value] for name, value in figures.items())
        if self._writer is None and self._table is None:
            self.rows.append({"step": self.step, **figures})

    def close(self) -> None:
        """Flush and close the writer of TensorBoard."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
