"""A small Llama of transformers, built from a `LlamaConfig`, on real text: by default Python's own standard library.

    pip install "lockstep-trainer[transformers]"
    lockstep fit examples/llama_hf.yaml
    lockstep fit examples/llama_hf.yaml strategy=tensor devices=2     # sharded as the model's own plan says
    lockstep fit examples/llama_hf.yaml module.save_to=out            # writes a folder for from_pretrained

Tokens are bytes. Expect the loss to fall from 5.6 to about 1.6 nats a byte within a minute on two cores.
"""

import sys

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import Module


class Llama(Module):
    """`save_to` is a folder of transformers to write when training ends."""

    def __init__(
        self,
        width: int = 96,
        depth: int = 3,
        num_heads: int = 4,
        num_key_value_heads: int = 2,
        tied: bool = True,
        context: int = 128,
        lr: float = 3e-3,
        prompt: str = "def ",
        sample_bytes: int = 100,
        save_to: str | None = None,
    ):
        super().__init__()
        self.save_hyperparameters()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=depth,
            num_attention_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            max_position_embeddings=2 * context,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # [B, context + 1] int64
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def on_fit_end(self) -> None:
        if self.hparams.sample_bytes:  # on all ranks, since a sharded model computes together
            prompt = torch.tensor([list(self.hparams.prompt.encode())], device=self.device)
            text = self.model.generate(prompt, max_new_tokens=self.hparams.sample_bytes, do_sample=False)[0]
            sample = bytes(text.tolist()).decode(errors="replace")
            self.print(f"\n---- text after {self.global_step} steps ----\n{sample}\n----")
        if self.hparams.save_to:
            with self.trainer.whole(self):  # on every rank, whatever shards the model
                if self.trainer.is_global_zero:
                    self.model.save_pretrained(self.hparams.save_to)


if __name__ == "__main__":
    from lockstep.trainer.cli.main import main

    sys.exit(main(["fit", "examples/llama_hf.yaml", *sys.argv[1:]]))
