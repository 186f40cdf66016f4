"""`sac.context_fn` in torch's own checkpoint: what it refuses, and that it keeps to the policy."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.blocks import Stack, install, llama_stack, policy, save, selective, tokens
from tests.support.model_zoo import tiny
from tests.support.recording import backward_ops
from tests.support.training import assert_same, built

PLAIN = 28  # products in the backward of two blocks without checkpointing; each block has seven


def products(written: dict[str, Any], entry: str, model: Stack | None = None) -> int:
    """How many products run again in the backward of both blocks."""
    model = install(model or built(llama_stack), selective(written), entry)
    return backward_ops(model, tokens()).ops["aten.mm.default"] - PLAIN


def test_optional_rules_on_modules_match_nothing_without_the_module() -> None:
    """Not even `module: ""`: without the module it is unknown in which one an op runs."""
    attention = save("attention", id="attention")
    optional = [save("matmul", id=f"optional-{at}", module=at, optional=True) for at in ("", "mlp.**")]
    with_them, without = policy(*optional, attention), policy(attention)
    assert products(with_them, "context_fn") == products(without, "context_fn")
    assert products(with_them, "context_fn with module") < products(without, "context_fn with module")
    with pytest.raises(sac.SacError, match='rule "optional-mlp" matches by module'):
        sac.context_fn(policy({**optional[1], "id": "optional-mlp", "do": "recompute"}, save("matmul", id="rest")))


@pytest.mark.parametrize("source", ["general", "General", sac.load_policy("general"), {"extends": "general"}])
def test_checkpointing_of_hugging_face_takes_it_from_any_source(source: Any) -> None:
    gradients = []
    for own in (False, True):
        model, inputs = tiny("llama", attention_dropout=0.2, use_cache=False)
        if own:
            kwargs = {"use_reentrant": False, "context_fn": sac.context_fn(source)}
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        torch.manual_seed(0)
        model(**inputs).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(*gradients)


def llama_layer() -> nn.Module:
    return tiny("llama")[0].model.layers[0]


REFUSED: dict[str, tuple[Any, Any, str]] = {
    # name: (the policy, what makes the block if one is given, the place and what is wrong)
    "module": (policy(save("matmul", module="mlp.**")), None, r"rules\[0\]\.module: .* by module.*module=block"),
    "layers": (policy(save("matmul", layers={"first": 1})), None, r"rules\[0\]\.layers: .* selects layers"),
    "blocks": (policy(save("matmul", blocks="a")), None, r"rules\[0\]\.blocks: .*\n.*fix: use sac.apply"),
    "blocks with a module": (policy(save("matmul", blocks="a")), llama_layer, r"rules\[0\]\.blocks: "),
    "a block without a number": (
        policy(save("matmul", layers={"first": 1})),
        lambda: llama_stack().blocks[0],
        "selects layers, which a block tells by layer_idx, ",
    ),
    "the last layers": (policy(save("matmul", layers={"last": 1})), llama_layer, "needs the number of layers"),
    "a fraction": (policy(save("matmul", layers={"fraction": 0.5})), llama_layer, "needs the number of layers"),
    "unknown": ("lama", None, "no shipped policy .*\n.*did you mean: llama"),
    "a rule that offloads": (policy({"ops": "matmul", "do": "offload"}), None, r"rules\[0\]\.do: .* offloads"),
    "a default that offloads": (policy(default="offload"), None, r"policy\.default: the default offloads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_the_block_as_it_was(name: str) -> None:
    written, build, text = REFUSED[name]
    block = build and build()
    with pytest.raises(sac.SacError, match=text):
        sac.context_fn(written, module=block)
    assert block is None or not any("forward" in vars(module) for module in block.modules())


def test_layers_of_blocks_that_tell_theirs() -> None:
    model = built(llama_stack)
    for layer, block in enumerate(model.blocks):
        block.layer_idx = layer
    written = policy(save("matmul", layers=["1"]))
    assert products(written, "context_fn with module", model) == 6


def test_result_pickles() -> None:
    contexts = pickle.loads(pickle.dumps(sac.context_fn("general")))
    (x,) = tokens()
    block = built(llama_stack).blocks[0]
    checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_module_can_be_given_back() -> None:
    block = built(llama_stack).blocks[0]
    sac.context_fn(policy(save("matmul", module="mlp.**")), module=block)
    assert any("forward" in vars(module) for module in block.modules())
    sac.remove(block)
    assert not any("forward" in vars(module) for module in block.modules())
