"""A mask in the Hugging Face Trainer: override `training_step`, keep everything else.

Every example has the number of its domain. One recorded forward pass serves the whole batch; its examples are then
split into one loss per domain, and a masked backward pass replaces `accelerator.backward`. The model is a tiny BERT
with random weights, built from a config: nothing is downloaded.

    python examples/hugging_face_trainer.py --steps 60

The generated "sentences" contain noisy words that predict the label in every domain, and a code word that predicts it
perfectly, a different one in each domain. In the unseen domain the code words are random. The data is designed so that
masks help. The settings matter: with the Trainer's default optimizer, tau = 0.8 and no `rescale`, the masked model has
87% on the unseen domain after 60 steps, and 67% after 240.
"""

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import sandmask

DOMAINS, WORDS, LENGTH = 6, 20, 12  # words: the first half of them lean towards label 1
CODE_WORDS = 2 * DOMAINS  # two per domain, one per label


class Sentences(Dataset[dict[str, Tensor]]):
    """Rows of word numbers, with label and domain; `code=False` puts code words at random."""

    def __init__(self, size: int, domain: int, *, code: bool = True) -> None:
        generator = torch.Generator().manual_seed(domain)
        self.domain = torch.tensor(domain)
        self.labels = torch.randint(2, (size,), generator=generator)
        leaning = torch.rand(size, LENGTH, generator=generator) < 0.7  # 70% of the words go with the label
        half = torch.where(leaning, self.labels[:, None], 1 - self.labels[:, None])
        words = torch.randint(WORDS // 2, (size, LENGTH), generator=generator) + half * (WORDS // 2)
        codes = 2 * domain + self.labels if code else torch.randint(CODE_WORDS, (size,), generator=generator)
        self.sentences = torch.cat([WORDS + codes[:, None], words], dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.sentences[index], "labels": self.labels[index], "domain": self.domain}


class MaskedTrainer(Trainer):
    """A Trainer whose gradients go through a mask."""

    def __init__(self, *args: Any, mask: sandmask.Mask, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.args.gradient_accumulation_steps > 1:
            raise ValueError("Each accumulated piece would be masked by itself: raise the batch size instead.")
        self.mask = mask

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,  # noqa: ARG002 - the Trainer passes it
    ) -> Tensor:
        """One forward pass, one loss per domain, one masked backward pass; the Trainer clips and steps."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        order = inputs["domain"].argsort()  # examples of the same domain next to each other
        inputs = {name: values[order] for name, values in inputs.items()}
        sizes = inputs.pop("domain").bincount(minlength=DOMAINS).tolist()
        labels = torch.split(inputs.pop("labels"), sizes)
        with self.compute_loss_context_manager(), sandmask.record(model, sizes) as recording:
            logits = torch.split(model(**inputs).logits.float(), sizes)
        losses = [nn.functional.cross_entropy(*of_domain) for of_domain in zip(logits, labels, strict=True)]
        recording.backward(losses, self.mask, processes="average", scaler=self.accelerator.scaler)
        return torch.stack(losses).mean().detach()


def accuracy(model: nn.Module, data: Sentences) -> float:
    """Share of labels that are right."""
    model.eval()
    with torch.no_grad():
        return float((model(input_ids=data.sentences).logits.argmax(1) == data.labels).float().mean())


def train(mask: sandmask.Mask | None, steps: int, folder: str) -> nn.Module:
    """A tiny BERT, trained by the usual Trainer or by the masked one."""
    set_seed(0)
    config = BertConfig(
        vocab_size=WORDS + CODE_WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH + 1,
    )
    model = BertForSequenceClassification(config)  # type: ignore[no-untyped-call]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=32 * DOMAINS,  # of all domains together
        lr_scheduler_type="cosine",
        remove_unused_columns=False,  # else "domain" is one of them
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=3e-4)  # not AdamW, the Trainer's default
    data: Dataset[dict[str, Tensor]] = ConcatDataset([Sentences(512, domain) for domain in range(DOMAINS)])
    if mask is None:
        trainer = Trainer(model, arguments, _without_domain, data, optimizers=(optimizer, None))
    else:
        trainer = MaskedTrainer(model, arguments, train_dataset=data, optimizers=(optimizer, None), mask=mask)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model


def _without_domain(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The batch that the usual Trainer gets."""
    return {name: torch.stack([example[name] for example in examples]) for name in ("input_ids", "labels")}


def main() -> None:
    """Fine-tune with and without a mask, and compare on a domain whose code words mean nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # for so small a model, more threads mostly wait for each other
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    seen, unseen = Sentences(512, domain=0), Sentences(4096, domain=99, code=False)
    print(f"{'':<16}{'a seen domain':>15}{'unseen domain':>15}")
    for name, mask in {"plain gradient": None, "AND-mask": sandmask.ANDMask(tau=0.9, rescale="sparsity")}.items():
        with tempfile.TemporaryDirectory() as folder:
            model = train(mask, steps, folder)
        print(f"{name:<16}{accuracy(model, seen):>15.1%}{accuracy(model, unseen):>15.1%}")


if __name__ == "__main__":
    main()
