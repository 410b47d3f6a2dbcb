"""A small BERT of transformers, built from a config, learns which package of Python's standard library words are from.

    pip install "lockstep-trainer[transformers]"
    lockstep fit examples/bert.yaml
    lockstep fit examples/bert.yaml strategy=fsdp devices=2       # the same numbers from two processes
    lockstep fit examples/bert.yaml module.save_to=out            # writes a folder for from_pretrained
    lockstep fit examples/bert.yaml module.pretrained=out         # begins with one

Expect a validation accuracy of about 86 % within half a minute on two cores. Nothing is downloaded.
"""

import re
import sys
import sysconfig
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification

from lockstep import DataModule, Module

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
CLS, WORDS, VOCABULARY = 1, 2, 4096  # 0 is padding; words are numbers from 2 on, by their checksums


class Classifier(Module):
    """`pretrained` is a folder of transformers to begin with, `save_to` one to write when training ends."""

    def __init__(
        self,
        width: int = 64,
        depth: int = 2,
        lr: float = 1e-3,
        pretrained: str | None = None,
        save_to: str | None = None,
    ):
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=4 * width,
            num_labels=len(PACKAGES),
        )
        self.model = BertForSequenceClassification(config)
        if pretrained:
            self.model = BertForSequenceClassification.from_pretrained(pretrained).train()
        self.accuracy = MulticlassAccuracy(num_classes=len(PACKAGES), average="micro")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        outputs = self.model(**batch)
        self.accuracy(outputs.logits, batch["labels"])
        self.log_dict({"val/loss": outputs.loss, "val/acc": self.accuracy}, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    def on_fit_end(self) -> None:
        if self.hparams.save_to:
            with self.trainer.whole(self):  # on every rank, whatever shards the model
                if self.trainer.is_global_zero:
                    self.model.save_pretrained(self.hparams.save_to)


class Snippets(Dataset):
    """Rows of numbered words, each with the number of its package."""

    def __init__(self, rows: list[tuple[list[int], int]], length: int):
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words, label = self.rows[index]
        tokens = torch.zeros(self.length + 1, dtype=torch.long)
        tokens[: len(words) + 1] = torch.tensor([CLS, *words])
        return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": torch.tensor(label)}


class Source(DataModule):
    """Snippets of `length` words from the source of PACKAGES; of each file the last tenth is for validation."""

    def __init__(self, length: int = 32, batch_size: int = 32):
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def setup(self, stage: str) -> None:
        train, val = [], []
        for label, package in enumerate(PACKAGES):
            for file in sorted((Path(sysconfig.get_paths()["stdlib"]) / package).glob("*.py")):
                words = re.findall(r"[A-Za-z]+", file.read_text(encoding="utf-8", errors="ignore"))
                numbers = [crc32(word.encode()) % (VOCABULARY - WORDS) + WORDS for word in words]
                rows = [(numbers[i : i + self.length], label) for i in range(0, len(numbers), self.length)]
                train += rows[: len(rows) * 9 // 10]
                val += rows[len(rows) * 9 // 10 :]
        self.train, self.val = Snippets(train, self.length), Snippets(val, self.length)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 128)


if __name__ == "__main__":
    from lockstep.trainer.cli.main import main

    sys.exit(main(["fit", "examples/bert.yaml", *sys.argv[1:]]))
