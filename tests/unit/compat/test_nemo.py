"""NeMo Automodel's functions, one import line changed: what its parallelizer does with them, and what each returns."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # registers the ops that gather parameters
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, noop_context_fn

import sac
from sac.blocks.find import find_blocks
from sac.blocks.install import InstalledForward, ours_on, regions_of
from sac.compat import nemo
from sac.compat.nemo import (
    apply_selective_checkpointing_to_layers,
    apply_submodule_checkpointing,
    detect_kv_sharing_and_maybe_disable_cache,
    is_selective_activation_checkpointing,
    make_selective_checkpoint_context_fn,
)
from sac.errors import ConfigError, ModelError, SacWarning
from tests.support.layers import stack
from tests.support.model_zoo import tiny
from tests.support.recording import Recorder


def step(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The loss, all gradients and the random state after one step."""
    torch.manual_seed(0)
    loss = model(**inputs).loss if isinstance(inputs, dict) else model(*inputs).square().sum()
    loss.backward()
    found = [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
    model.zero_grad()
    return [*found, torch.get_rng_state()]


def assert_same_step(model: nn.Module, plain: nn.Module, inputs: Any) -> None:
    expected = step(plain, inputs)
    for _ in range(2):
        found = step(model, inputs)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [block.module for block in find_blocks(model) if "vision" not in block.path and "visual" not in block.path]


def region_paths(model: nn.Module) -> list[str]:
    return [installed.region.path for installed in regions_of(model)]


def parallelize(model: nn.Module, value: Any) -> list[nn.Module]:
    """What NeMo's parallelizer does when activation checkpointing is asked for."""
    is_shared = detect_kv_sharing_and_maybe_disable_cache(model)
    layers = layers_of(model)
    if is_selective_activation_checkpointing(value):
        apply_selective_checkpointing_to_layers(model, layers, is_shared, enable_compile=False)
    else:
        apply_submodule_checkpointing(layers, is_shared)
    return layers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("selective", True), ("Selective", True), ("SELECTIVE", True), ("full", False), ("true", False),
        (True, False), (False, False), (None, False), ({"mode": "selective"}, False), ("llama", False),
    ],
)  # fmt: skip
def test_only_the_word_is_selective(value: Any, expected: bool) -> None:
    assert is_selective_activation_checkpointing(value) is expected


@pytest.mark.parametrize("value", ["selective", "full", True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3n", "gemma4"])
@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
def test_training_is_that_without(family: str, value: Any) -> None:
    model, inputs = tiny(family)
    plain = copy.deepcopy(model)
    layers = parallelize(model, value)
    assert layers == layers_of(model)
    assert region_paths(model)
    assert_same_step(model, plain, inputs)


def test_selective_layers_are_regions_under_the_policy_of_the_family() -> None:
    model, inputs = tiny("llama")
    parallelize(model, "selective")
    count = len(layers_of(model))
    assert region_paths(model) == [f"model.layers.{place}" for place in range(count)]
    step(model, inputs)
    assert "attention" in str(sac.report(model).to_dict())
    assert {installed.region.group.table.policy.name for installed in regions_of(model)} == {"llama"}


def test_parts_of_layers_are_regions_norms_too() -> None:
    model, _ = tiny("llama")
    layers = layers_of(model)
    apply_submodule_checkpointing(layers, False)
    parts = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    assert region_paths(model) == [f"{place}.{part}" for place in range(len(layers)) for part in parts]


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_attention_that_shares_keys_and_values_is_left_alone(family: str) -> None:
    model, _ = tiny(family)
    assert detect_kv_sharing_and_maybe_disable_cache(model)
    assert model.config.get_text_config().use_cache
    with pytest.warns(SacWarning) as warned:
        apply_selective_checkpointing_to_layers(model, layers_of(model), True)
    assert [str(one.message) for one in warned] == [
        "these layers share keys and values, so that attention cannot be recomputed: their other sub-modules are "
        "recomputed as a whole"
    ]
    attention = {id(part) for layer in layers_of(model) for part in layer.self_attn.modules()}
    on = [module for module in model.modules() if isinstance(ours_on(module), InstalledForward)]
    assert on
    assert attention.isdisjoint(map(id, on))
    assert any(module is layers_of(model)[0].mlp for module in on)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_cache_is_turned_off_where_no_layer_reads_another(family: str) -> None:
    model, _ = tiny(family)
    assert model.config.get_text_config().use_cache
    assert detect_kv_sharing_and_maybe_disable_cache(model) is False
    assert not model.config.get_text_config().use_cache


def test_the_context_function_saves_attention_and_every_second_product() -> None:
    layer, context_fn = stack(1)[0], make_selective_checkpoint_context_fn()
    counts = {}
    for name, run in {
        "none": layer,
        "full": lambda x: checkpoint(layer, x, use_reentrant=False),
        "selective": lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=context_fn),
    }.items():
        out = run(torch.randn(2, 8, 32, requires_grad=True))
        with Recorder() as backward:
            out.sum().backward()
        attention = backward.ops["aten._scaled_dot_product_flash_attention_for_cpu.default"]
        counts[name] = (attention, backward.count("aten.addmm.default"))
    assert counts == {"none": (0, 0), "full": (1, 3), "selective": (0, 1)}


def test_layers_that_are_regions_already_are_refused() -> None:
    model = stack(2)
    apply_selective_checkpointing_to_layers(model, [model[1]], False)
    with pytest.raises(ModelError) as error:
        apply_selective_checkpointing_to_layers(model, list(model), False)
    assert str(error.value) == "1: this module is a region of sac already\n    fix: call sac.remove(model) first"
    assert region_paths(model) == ["1"]


def test_layers_with_checkpointing_of_their_own_are_refused() -> None:
    model = stack(2)
    model[0].up = checkpoint_wrapper(model[0].up)
    with pytest.raises(ModelError) as error:
        apply_selective_checkpointing_to_layers(model, list(model), False)
    assert str(error.value) == (
        "PreNormLayer: the model's own checkpointing is on: checkpoint_wrapper is around up (Linear) (build the model "
        "without it)\n"
        "    fix: turn it off, then call sac.apply; two at once would run every block three times"
    )
    assert region_paths(model) == []


def test_layers_that_nemo_has_flagged_are_left_alone() -> None:
    model = stack(2)
    model[0]._nemo_disable_activation_checkpointing = True
    apply_selective_checkpointing_to_layers(model, list(model), has_kv_sharing=False)
    assert [kind.count for kind in sac.report(model).kinds] == [1]
    assert not isinstance(ours_on(model[0]), InstalledForward)


# Since the summer of 2026: whole layers, context functions, ignored ops

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
PRODUCTS = {"schema": "sac/v1", "name": "products", "rules": [{"id": "products", "ops": "matmul", "do": "save"}]}
TE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    model(x).square().sum().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


def policies(model: nn.Module) -> set[str]:
    return {installed.region.group.table.policy.name for installed in regions_of(model)}


# Whole layers


def test_whole_layers_are_regions_that_are_recomputed_as_a_whole() -> None:
    model = stack(3)
    plain, x = copy.deepcopy(model), torch.randn(2, 8, 32)
    nemo.apply_full_layer_checkpointing_to_layers(model, list(model))
    assert region_paths(model) == ["0", "1", "2"]
    assert policies(model) == {"full"}
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, x), gradients(plain, x)))


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_wrapper_is_taken_off(wrapped: bool) -> None:
    inner = nn.Linear(2, 2)
    assert nemo.unwrap_checkpoint_wrapper(checkpoint_wrapper(inner) if wrapped else inner) is inner


# Context functions


def snapshot_of(inner: Any) -> Callable[[], Any]:
    return partial(nemo.transformer_engine_attention_backend_snapshot_context_fn, inner)


@pytest.mark.parametrize(
    ("context_fn", "policy"),
    [
        (None, "full"),
        (noop_context_fn, "full"),
        (nemo.sdpa_backend_snapshot_context_fn, "full"),
        (nemo.transformer_engine_attention_backend_snapshot_context_fn, "full"),
        (snapshot_of(nemo.sdpa_backend_snapshot_context_fn), "full"),
        (nemo.make_selective_checkpoint_context_fn(), "general"),
        (snapshot_of(nemo.make_selective_checkpoint_context_fn()), "general"),
        (sac.context_fn(PRODUCTS), "products"),
    ],
)
def test_parts_take_the_context_functions(context_fn: Any, policy: str) -> None:
    model = stack(1)
    plain, x = copy.deepcopy(model), torch.randn(2, 8, 32)
    nemo.apply_submodule_checkpointing(list(model), False, context_fn=context_fn)
    assert policies(model) == {policy}
    assert all(map(torch.equal, gradients(model, x), gradients(plain, x)))


def test_contexts_of_the_callers_own_are_refused() -> None:
    def mine() -> Any:
        return noop_context_fn()

    model = stack(1)
    with pytest.raises(ConfigError) as error:
        nemo.apply_submodule_checkpointing(list(model), False, context_fn=snapshot_of(mine))
    assert str(error.value) == (
        "apply_submodule_checkpointing.context_fn: mine makes its own contexts around forward and "
        "recomputation, which regions do not enter\n"
        "    fix: choose per op with context_fn=sac.context_fn(policy), or leave it out"
    )
    assert region_paths(model) == []


def attend(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x).sin()


def ops_again(context_fn: Callable[[], Any]) -> tuple[bool, list[Tensor]]:
    """Whether the math path ran again in backward, which was entered with other backends on, and gradients."""
    x = torch.linspace(-1, 1, 2 * 2 * 8 * 16).view(2, 2, 8, 16).requires_grad_()
    with sdpa_kernel([SDPBackend.MATH]):
        out = checkpoint(attend, x, use_reentrant=False, context_fn=context_fn, determinism_check="none")
    grads = []
    with Recorder() as backward:
        grads += torch.autograd.grad(out.sum(), x)
    return backward.count(FLASH) == 0, grads


@pytest.mark.parametrize(
    "context_fn",
    [nemo.sdpa_backend_snapshot_context_fn, snapshot_of(nemo.sdpa_backend_snapshot_context_fn)],
    ids=["alone", "inside"],
)
def test_attention_runs_again_under_the_backends_of_the_forward(context_fn: Callable[[], Any]) -> None:
    assert ops_again(context_fn)[0]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        ops_again(context_fn)
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for TransformerEngine's module: its dict of what was chosen last."""
    module = types.ModuleType(TE)
    module._attention_backends = {"attention_params": None, "use_flash_attention": None}
    monkeypatch.setitem(sys.modules, TE, module)
    return module._attention_backends


class Chooser(nn.Module):
    """Chooses on its first call with some parameters, and saves more for backward in that call."""

    def __init__(self, choices: dict[str, Any]) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.choices = choices

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.choices["attention_params"] is None:
            self.choices["attention_params"] = torch.ones(2)  # not to be compared with ==
            x = x.sin().cos()
        return x.exp()


@pytest.mark.parametrize(
    "run",
    [
        lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=snapshot_of(None)),
        lambda block, x: sac.checkpoint(block, x),
    ],
    ids=["torch", "sac"],
)
def test_the_choice_of_transformer_engine_is_that_of_the_forward(
    engine: dict[str, Any], run: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    block = Chooser(engine)
    plain = copy.deepcopy(block)
    plain.choices = {"attention_params": None}
    x = torch.randn(3, 4)
    for _ in range(2):
        for one, call in ((block, run), (plain, lambda block, x: block(x))):
            one.zero_grad()
            call(one, x).sum().backward()
        assert torch.equal(block.up.weight.grad, plain.up.weight.grad)
        assert engine["attention_params"] is not None  # as the program left it


# Ignored ops


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The set of torch's, put back after the test."""
    own = set(torch.utils.checkpoint.SAC_IGNORED_OPS)
    monkeypatch.setattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", own)
    return own


def test_ops_are_ignored_but_for_those_that_are_not_there(ignored: set[Any]) -> None:
    before = set(ignored)
    nemo.ignore_sac_ops([torch.ops.aten.sin.default, None])
    assert ignored - before == {torch.ops.aten.sin.default}
