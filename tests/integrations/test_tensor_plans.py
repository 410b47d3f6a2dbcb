"""What strategy tensor makes of the plans that models of transformers declare, and of those around PEFT's adapters."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers

from lockstep.strategies.mesh.tensor_plan import declared
from lockstep.strategies.mesh.tensor_plan.declared import declared_styles
from lockstep.strategies.mesh.tensor_plan.make import make_plan
from tests.integrations.hugging_face import NEEDS_PEFT, SIZE, TEXT, bert, gpt2, llama, lora, qwen3

pytestmark = NEEDS_PEFT


def last(styles: dict[str, Any], layer: str) -> str:
    """The style of a layer in the last block, whatever wraps the model."""
    (style,) = [style for name, style in styles.items() if name.endswith(f"1.{layer}")]
    return style


def test_norms_of_heads_are_whole_and_their_gradients_summed() -> None:
    styles = declared_styles(nn.Sequential(qwen3()), 2) or {}
    assert last(styles, "self_attn.q_norm") == last(styles, "self_attn.k_norm") == "replicated"
    assert last(styles, "self_attn.q_proj") == "column"


def test_adapters_are_sharded_as_the_layers_that_they_adapt() -> None:
    styles = declared_styles(lora(), 2) or {}
    assert last(styles, "self_attn.q_proj.base_layer") == last(styles, "self_attn.q_proj.lora_B.default") == "column"
    assert last(styles, "self_attn.o_proj.base_layer") == last(styles, "self_attn.o_proj.lora_A.default") == "row"
    assert last(styles, "self_attn.k_proj") == "column"
    assert not any("q_proj.lora_A" in name or "o_proj.lora_B" in name for name in styles)


def test_whole_layers_of_a_size_that_ranks_do_not_divide_stay_whole() -> None:
    config = transformers.LlamaConfig(num_key_value_heads=2, **SIZE, **TEXT | {"vocab_size": 33})
    styles = declared_styles(transformers.LlamaForCausalLM(config), 2) or {}
    assert "lm_head" not in styles and "model.embed_tokens" not in styles
    assert last(styles, "mlp.down_proj") == "row"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, r"q_proj.base_layer and its LoRA adapters, but not lora_magnitude_vector"),
        ({"target_modules": ["embed_tokens"]}, r"'embedding_rowwise' of .*embed_tokens, which is peft.*\.Embedding"),
    ],
    ids=["DoRA", "an embedding"],
)
def test_adapters_that_compute_with_the_whole_weight_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declared_styles(lora(**options), 2)


def test_every_style_of_transformers_is_followed_or_refused_by_name() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES  # which the import fills

    known = set(ALL_PARALLEL_STYLES.keys())
    assert len(known) > 10 and set(declared.STYLES) <= known
    for style in known - set(declared.STYLES):
        model = nn.Sequential(nn.Linear(4, 4))
        model._tp_plan = {"*": style}  # type: ignore[assignment]
        with pytest.raises(ValueError, match=f"{style!r} of 0, which strategy tensor does not know"):
            declared_styles(model, 2)


def test_a_plan_of_a_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model._tp_plan = {"*.weight": "colwise"}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"'colwise' of 0\.weight, which is a parameter"):
        declared_styles(model, 2)


def test_experts_are_refused_by_name() -> None:
    config = transformers.MixtralConfig(num_local_experts=2, head_dim=8, num_key_value_heads=2, **SIZE, **TEXT)
    with pytest.raises(ValueError, match=r"MixtralForCausalLM says '\w+' of model\.layers\.0\.mlp\.experts"):
        declared_styles(transformers.MixtralForCausalLM(config), 2)


def test_gpt2_is_sharded_although_its_weights_are_transposed() -> None:
    styles = make_plan(gpt2(), {}, 2).styles
    assert [last(styles, name) for name in ("mlp.c_fc", "mlp.c_proj")] == ["column", "row"]
    assert [last(styles, name) for name in ("attn.c_attn", "attn.c_proj")] == ["gather", "scatter"]
    assert "lm_head" not in styles


def test_a_subclass_of_a_transposed_layer_stays_whole() -> None:
    from transformers.pytorch_utils import Conv1D

    class Scaled(Conv1D):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x).mean(-1, keepdim=True)

    model = nn.Sequential(nn.Linear(4, 4), Scaled(4, 4))
    assert list(make_plan(model, {}, 2).styles) == ["0"]


def test_hooks_on_whole_outputs_are_allowed_and_others_refused() -> None:
    model: Any = llama()
    model.enable_input_require_grads()  # a forward hook on the embedding, as gradient checkpointing sets
    assert make_plan(model, {}, 2).styles["model.embed_tokens"] == "embedding"
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"shards model\.layers\.0\.self_attn\.q_proj, but it has hooks"):
        make_plan(model, {}, 2)


def test_bert_is_found_by_names() -> None:
    assert last(make_plan(bert(), {}, 2).styles, "attention.self.query") in ("column", "gather", "scatter")


def test_a_model_without_a_plan_of_its_own_is_not_taken_for_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.config = types.SimpleNamespace(base_model_tp_plan={"layers.*.q_proj": "colwise"})  # type: ignore[assignment]
    assert declared_styles(model, 2) is None


def test_sequence_parallelism_refuses_layers_that_take_the_whole_sequence() -> None:
    model: Any = gpt2()
    blocks = {f"transformer.h.{i}": block for i, block in enumerate(model.transformer.h)}
    with pytest.raises(ValueError, match=r"h\.0\.attn\.c_attn is sharded by 'gather', which takes the whole sequence"):
        make_plan(model, blocks, 2, sequence_parallel=True)
