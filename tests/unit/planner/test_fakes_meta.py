"""A model on the meta device is planned as the same model on the CPU is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sac
from sac.errors import PlanError
from tests.support.model_zoo import tiny
from tests.unit.planner.small_model import Block, Model

WIDTH = 64


class Attending(nn.Module):
    """What a GPU runs by other ops than a CPU: RMS norm, attention and dropout; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.dropout(self.out(y) * self.scale)


class Attenders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_it_gets_the_plan_of_the_model_on_the_cpu(device: str) -> None:
    model, x = Attenders().bfloat16(), torch.zeros(2, 64, WIDTH, dtype=torch.bfloat16)
    on_meta = copy.deepcopy(model).to("meta")
    expected = sac.plan(model, (x,), "60%", device=device)
    assert sac.plan(on_meta, (x,), "60%", device=device) == expected
    assert sac.plan(on_meta, (x.to("meta"),), "60%", device=device) == expected
    assert all(tensor.is_meta for tensor in [*on_meta.parameters(), *on_meta.buffers()])


@pytest.mark.usefixtures("few_choices")
def test_a_hugging_face_model_with_tied_weights() -> None:
    model, inputs = tiny("llama", tie_word_embeddings=True)
    on_meta = copy.deepcopy(model).to("meta")
    on_meta.tie_weights()
    assert on_meta.lm_head.weight is on_meta.model.embed_tokens.weight
    assert sac.plan(on_meta, inputs, "50%", device="h100") == sac.plan(model, inputs, "50%", device="h100")


def test_inputs_that_are_trained_count_as_such() -> None:
    model, x = Attenders().requires_grad_(False), torch.zeros(2, 64, WIDTH, requires_grad=True)
    expected = sac.plan(model, (x,), "60%", device="cpu")
    on_meta = x.detach().to("meta").requires_grad_()
    assert sac.plan(model.to("meta"), (on_meta,), "60%", device="cpu") == expected


def error_of(model: nn.Module, **given: object) -> str:
    with pytest.raises(PlanError) as error:
        sac.plan(model.to("meta"), (torch.zeros(32, 16),), "50%", **given)
    return str(error.value)


def test_it_does_not_tell_for_which_device() -> None:
    assert error_of(Model()) == (
        "device: the model is on the meta device, so sac does not know where it will be trained\n"
        '    fix: name the device: device="h100"'
    )


def test_it_has_no_data() -> None:
    assert error_of(Model(), device="cpu", real=True) == (
        "Model: it is on the meta device, and a plan on real tensors needs data\n"
        "    fix: plan without real=True, or give it data: model.to_empty(device=…)"
    )


def test_it_cannot_be_copied() -> None:
    class Handle:
        def __deepcopy__(self, memo: object) -> object:
            raise TypeError("cannot pickle 'handle' object")

    model = Model(Block(), Block())
    model.handle = Handle()
    assert error_of(model, device="h100") == (
        "Model: the model cannot be copied: TypeError: cannot pickle 'handle' object"
    )
