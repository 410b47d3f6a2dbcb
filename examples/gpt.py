"""A byte-level GPT on real text: by default the source of Python's own standard library.

    lockstep fit examples/gpt.yaml
    lockstep fit examples/gpt.yaml strategy=ddp devices=2
    lockstep fit examples/gpt.yaml module.optimizer=muon      # matrices by Muon, the rest by AdamW
    python examples/gpt.py --text shakespeare.txt

Expect the loss to fall from 5.6 to about 2 nats a byte in one to two minutes on two cores, text that begins to
look like Python, and in TensorBoard the loss, tokens per second and samples of text at every validation.
"""

import argparse
import sys
import sysconfig
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep import DataModule, Module, split_parameters

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from the projections, so they may be sharded by heads."""

    def __init__(self, width: int, head_width: int):
        super().__init__()
        self.head_width = head_width
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )  # [B, H, T, D]
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, head_width: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, head_width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of the next byte at every position: `[B, T]` int64 -> `[B, T, 256]`."""

    def __init__(self, width: int, depth: int, head_width: int, context: int):
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, head_width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if (
                parameter.dim() == 2
            ):  # layers that write to the residual stream start smaller, as there are 2 x depth of them
                nn.init.normal_(
                    parameter, std=0.02 / (2 * depth) ** 0.5 if name.endswith(("o.weight", "down.weight")) else 0.02
                )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TextModel(Module):
    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        head_width: int = 32,
        context: int = 128,
        lr: float = 2e-3,
        optimizer: str = "adamw",
        betas: tuple[float, float] = (0.9, 0.95),  # of AdamW
        prompt: str = "def ",
        sample_bytes: int = 300,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT(width, depth, head_width, context)  # holds every parameter and is called once a step
        self.example_input_array = torch.zeros(1, context, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # [B, context + 1] int64
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        options = {"lr": self.hparams.lr, "weight_decay": 0.1}
        betas = tuple(self.hparams.betas)
        if self.hparams.optimizer == "adamw":
            return {"adamw": torch.optim.AdamW(self.parameters(), betas=betas, **options)}
        if self.hparams.optimizer != "muon":
            raise ValueError(f"optimizer must be adamw or muon, but is {self.hparams.optimizer!r}")
        matrices, others = split_parameters(self.gpt, besides=["head"])
        return {
            "muon": torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
            "adamw": torch.optim.AdamW(others, betas=betas, **options),
        }

    def on_validation_epoch_end(self) -> None:
        if self.hparams.sample_bytes and not self.trainer.sanity_checking:
            text = self.generate()  # on all ranks, since a sharded model computes together
            if self.trainer.is_global_zero and self.logger is not None:
                self.logger.log_text("sample", f"```\n{text}\n```", self.global_step)

    def on_fit_end(self) -> None:
        if self.hparams.sample_bytes:
            self.print(f"\n---- text after {self.global_step} steps ----\n{self.generate()}\n----")

    @torch.no_grad()
    def generate(self, temperature: float = 0.8) -> str:
        """Continue the prompt, the same way on all ranks; leaves the random streams of training alone."""
        generator = torch.Generator(self.device).manual_seed(0)
        tokens = torch.tensor([list(self.hparams.prompt.encode())], device=self.device)
        for _ in range(self.hparams.sample_bytes):
            logits = self.gpt(tokens[:, -self.gpt.context :])[:, -1].float() / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


class Windows(Dataset):
    """A text cut into windows of `context` bytes and the byte that follows."""

    def __init__(self, data: Tensor, context: int):
        self.data, self.context = data, context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index * self.context : (index + 1) * self.context + 1].long()


class Text(DataModule):
    """`text` is a file, or null for the standard library's source; of its first `max_bytes` the last tenth is for
    validation."""

    def __init__(self, text: Path | None = None, max_bytes: int = 1_000_000, context: int = 128, batch_size: int = 16):
        super().__init__()
        self.text, self.max_bytes, self.context, self.batch_size = text, max_bytes, context, batch_size

    def setup(self, stage: str) -> None:
        files = [self.text] if self.text else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        content = bytes(chain.from_iterable(file.read_bytes() for file in files))[: self.max_bytes]
        if len(content) < 20 * self.context:
            raise ValueError(
                f"the text has {len(content)} bytes, too few for training and validation with a context of "
                f"{self.context}"
            )
        data = torch.tensor(list(content), dtype=torch.uint8)
        cut = len(data) * 9 // 10
        self.train, self.val = Windows(data[:cut], self.context), Windows(data[cut:], self.context)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 64)


if __name__ == "__main__":
    from lockstep.trainer.cli.main import main

    parser = argparse.ArgumentParser(
        description="Train examples/gpt.yaml; further arguments are overrides such as trainer.max_epochs=2."
    )
    parser.add_argument("--text", metavar="FILE", help="train on this file in place of the standard library's source")
    arguments, overrides = parser.parse_known_args()
    sys.exit(
        main(["fit", "examples/gpt.yaml", *([f"data.text={arguments.text}"] if arguments.text else []), *overrides])
    )
