"""Tiny models of transformers and PEFT, their data, and trainings of them under a strategy."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lockstep import Module, Trainer
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.launcher import launch

NEEDS_PEFT = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="it is in the extra transformers")
"""To import it takes 3 s, in each worker of the tests and in each rank: only the tests that use it do."""
transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": 32, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NUM_SAMPLES, BATCH, STEPS = 14, 4, 5  # the last batch of an epoch is short


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=32, max_position_embeddings=16, num_labels=3, **NO_DROPOUT, **SIZE)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **none)
    return transformers.GPT2LMHeadModel(config)


def opt() -> nn.Module:
    none = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "pad_token_id": 1, "ffn_dim": 32}
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 16}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**TEXT, **size, **none))


def llama(tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=tied, **TEXT, **SIZE)
    return transformers.LlamaForCausalLM(config)


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(num_key_value_heads=2, head_dim=8, **TEXT, **SIZE)
    return transformers.Qwen3ForCausalLM(config)


def vit() -> nn.Module:
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape, **NO_DROPOUT, **SIZE))


def lora(model: nn.Module | None = None, **options: Any) -> nn.Module:
    import peft

    options = {"r": 2, "target_modules": ["q_proj", "v_proj", "o_proj"], "init_lora_weights": False} | options
    with warnings.catch_warnings():  # PEFT uses names that transformers has deprecated
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model or llama(), peft.LoraConfig(**options))  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "BERT": bert,
    "GPT-2": gpt2,
    "OPT": opt,
    "Llama, tied": lambda: llama(tied=True),
    "Llama": llama,
    "Qwen3": qwen3,
    "ViT": vit,
    "Llama with LoRA": lora,
}


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Batches of dicts, as transformers' models take them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens, label = torch.randint(0, 32, (8,), generator=generator), torch.tensor(index % 3)
        if self.kind == "ViT":
            pixels = torch.randn(1, 8, 8, generator=generator, dtype=torch.float32)
            return {"pixel_values": pixels, "labels": label}
        if self.kind == "BERT":
            return {"input_ids": tokens, "attention_mask": (torch.arange(8) < 8 - index % 3).long(), "labels": label}
        return {"input_ids": tokens, "labels": tokens}


class FineTuning(Module):
    """A model that computes its own loss, with its layers recomputed in the backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model: Any = MODELS[kind]()
        with warnings.catch_warnings():  # the usual name, which transformers has deprecated
            warnings.simplefilter("ignore")
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.model(**batch)
        self.log("loss", outputs.loss)
        return outputs.loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Result:
    weights: dict[str, torch.Tensor]
    loss: float = 0.0
    error: str = ""


def trainer(folder: str | os.PathLike[str], strategy: str, **options: Any) -> Trainer:
    """A quiet Trainer, on two ranks unless the strategy is "single"."""
    defaults: dict[str, Any] = {
        "devices": 1 if strategy == "single" else 2,
        "accelerator": "cpu",
        "precision": "32-true" if "deepspeed" in strategy else "64-true",
        "max_steps": STEPS,
        "max_epochs": 10,
        "split_batches": True,
        "seed": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "default_root_dir": str(folder),
    }
    return Trainer(strategy=strategy, **defaults | options)


def loader(kind: str) -> DataLoader[Any]:
    return DataLoader(Samples(kind), BATCH)


def train(kind: str, strategy: str, **options: Any) -> Result:
    """Train one model; on ranks that run already, in place."""
    module = FineTuning(kind)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trainer(folder, strategy, **options)
        try:
            run.fit(module, loader(kind))
        except Exception as error:
            return Result({}, error=f"{type(error).__name__}: {error}")
    world = environment.detect()
    if world is not None and world.rank:  # the whole weights are on rank 0
        return Result({})
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return Result(weights, float(run.callback_metrics["loss"]))


def train_each(kinds: Sequence[str], strategy: str, options: dict[str, Any]) -> dict[str, Result]:
    return {kind: train(kind, strategy, **options) for kind in kinds}


def on_ranks(kinds: Sequence[str], strategy: str, **options: Any) -> dict[str, Result]:
    """Train several models one after the other on the same two ranks, as a start of ranks takes longer."""
    if strategy == "pipeline":  # whose refusals come before the ranks start
        return train_each(kinds, strategy, options)
    return launch(train_each, (kinds, strategy, options), 2)
