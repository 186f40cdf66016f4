"""The bytes that a GPT layer keeps are those of the published formula, term by term; what differs has a name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sac.blocks.find import find_blocks
from sac.planner.fakes import call, fake_copy, fake_inputs, fake_mode
from sac.planner.profile import RegionProfile
from sac.planner.tracing import profile_regions
from tests.unit.planner.truth import measured, predicted

# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1: a layer keeps
# s b h (34 + 5 a s / h) bytes in 16 bit. s: tokens of a sequence, b: sequences, h: width, a: heads.

S, B, H, A = 16, 2, 32, 4
SBH, ASSB = S * B * H, A * S * S * B
TWO, MASK = 2, 1  # bytes of an element in 16 bit, and of a mask's

Dropout = Callable[[Tensor], Tensor]


def with_a_mask(x: Tensor) -> Tensor:
    """Dropout as a GPU runs it: the mask is boolean."""
    return torch.native_dropout(x, 0.1, True)[0]


def with_noise(x: Tensor) -> Tensor:
    """Dropout as torch runs it on a CPU: what is multiplied with is of the dtype of the input."""
    return F.dropout(x, 0.1)


class Attention(nn.Module):
    """Scores as a tensor, laid out as Megatron lays them out: s b h."""

    def __init__(self, dropout: Dropout) -> None:
        super().__init__()
        self.dropout = dropout
        self.qkv, self.proj = nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, x_SBH: Tensor) -> Tensor:
        per_head_SAD = self.qkv(x_SBH).view(S, B * A, 3 * H // A)
        q_ASD, k_ASD, v_ASD = (one.transpose(0, 1) for one in per_head_SAD.chunk(3, -1))
        scores_ASS = torch.baddbmm(
            q_ASD.new_empty(B * A, S, S), q_ASD, k_ASD.transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(H // A)
        )
        mixed_ASD = torch.bmm(self.dropout(scores_ASS.softmax(-1)), v_ASD)
        return self.dropout(self.proj(mixed_ASD.transpose(0, 1).reshape(S, B, H)))


class TorchAttention(Attention):
    """The same by torch's function; on a CPU with dropout it takes the path of single ops."""

    def forward(self, x_SBH: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (A, -1)).permute(1, 2, 0, 3) for one in self.qkv(x_SBH).chunk(3, -1))
        mixed_BASD = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.dropout(self.proj(mixed_BASD.permute(2, 0, 1, 3).reshape(S, B, H)))


class Layer(nn.Module):
    def __init__(self, attention: type[Attention], dropout: Dropout) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.attention = attention(dropout)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x_SBH: Tensor) -> Tensor:
        x_SBH = x_SBH + self.attention(self.norm1(x_SBH))
        return x_SBH + self.dropout(self.down(F.gelu(self.up(self.norm2(x_SBH)))))


class Model(nn.Module):
    def __init__(self, layers: int, attention: type[Attention], dropout: Dropout) -> None:
        super().__init__()
        self.first = nn.Linear(H, H)
        self.layers = nn.ModuleList(Layer(attention, dropout) for _ in range(layers))

    def forward(self, x_SBH: Tensor) -> Tensor:
        x_SBH = self.first(x_SBH)
        for layer in self.layers:
            x_SBH = layer(x_SBH)
        return x_SBH.mean()


def model_of(layers: int, attention: type[Attention], dropout: Dropout) -> tuple[nn.Module, tuple[Tensor]]:
    return Model(layers, attention, dropout).bfloat16(), (torch.randn(S, B, H).bfloat16(),)


def profile_of(attention: type[Attention], dropout: Dropout) -> RegionProfile:
    model, inputs = model_of(2, attention, dropout)
    mode = fake_mode()
    copied, given = fake_copy(model, mode), fake_inputs(inputs, mode)
    [profile] = profile_regions(find_blocks(copied), lambda: call(copied, given))
    return profile


def kept_terms(profile: RegionProfile) -> dict[str, int]:
    """Bytes that backward needs, by the module and the op that made them; each storage once."""
    terms: Counter[str] = Counter()
    for root in {profile.roots[need.value] for need in profile.needs}:
        if root in profile.maker:
            entry = profile.entries[profile.maker[root]]
            which = entry.makes.index(root)
            name = f"{entry.module or 'layer'}: {entry.op.removeprefix('aten.').removesuffix('.default')}"
            terms[name + (f"[{which}]" if which else "")] += profile.bytes[root]
    return dict(terms)


# What the formula counts, by what makes it. The input of the first norm is made by the layer before.
ATTENTION = {
    "norm1: native_layer_norm": TWO * SBH,  # the input of the three projections
    "attention.qkv: addmm": 3 * TWO * SBH,  # q and k for the scores, v for what they weigh
    "attention: _softmax": TWO * ASSB,
    "attention: native_dropout": TWO * ASSB,  # of the scores
    "attention: native_dropout[1]": MASK * (ASSB + SBH),  # of the scores, and of the output
    "attention: clone": TWO * SBH,  # the input of the output's projection
}
MLP = {
    "norm2: native_layer_norm": TWO * SBH,
    "up: addmm": 4 * TWO * SBH,  # the input of GELU
    "layer: gelu": 4 * TWO * SBH,
    "layer: native_dropout[1]": MASK * SBH,
}
SECOND_NORM = {"layer: add.Tensor": TWO * SBH}
FIRST_NORM = TWO * SBH
# What it leaves out: a mean and a deviation per token for each norm.
STATISTICS = {f"norm{n}: native_layer_norm[{which}]": TWO * S * B for n in (1, 2) for which in (1, 2)}


def test_terms_of_the_formula() -> None:
    assert sum(ATTENTION.values()) == 11 * SBH + 5 * ASSB
    assert sum(MLP.values()) == 19 * SBH
    assert sum(SECOND_NORM.values()) + FIRST_NORM == 4 * SBH
    assert sum({**ATTENTION, **MLP, **SECOND_NORM}.values()) + FIRST_NORM == SBH * (34 + 5 * A * S // H)


def test_a_layer_keeps_the_terms_of_the_formula_and_the_statistics_of_its_norms() -> None:
    found = kept_terms(profile_of(Attention, with_a_mask))
    assert found == {**ATTENTION, **MLP, **SECOND_NORM, **STATISTICS}


@pytest.mark.parametrize("dropout", [with_a_mask, with_noise])
def test_a_layer_more_takes_as_many_bytes_of_the_allocator(dropout: Dropout) -> None:
    """So the terms and what the first norm is given are all that a layer keeps, in truth and as predicted."""
    terms = sum(kept_terms(profile_of(Attention, dropout)).values()) + FIRST_NORM
    for seen_by in (predicted, measured):
        more, fewer = (seen_by(*model_of(layers, Attention, dropout), None).kept for layers in (3, 2))
        assert more - fewer == terms


# How what torch runs deviates from what the formula counts: bytes more or fewer in a term, and why.
NOISE = {  # on a CPU, F.dropout multiplies with a tensor in 16 bit where the formula counts a mask of one byte
    "attention: native_dropout[1]": -MASK * (ASSB + SBH),
    "layer: native_dropout[1]": -MASK * SBH,
    "attention: native_dropout": -TWO * ASSB,
    "attention: empty_like": TWO * (ASSB + SBH),
    "layer: empty_like": TWO * SBH,
    "attention: mul.Tensor": TWO * ASSB,
}


def with_deviations(terms: dict[str, int], deviations: dict[str, int]) -> dict[str, int]:
    total = Counter(terms)
    total.update(deviations)
    return {name: count for name, count in total.items() if count}


FORMULA = {**ATTENTION, **MLP, **SECOND_NORM, **STATISTICS}


def test_dropout_on_a_cpu_keeps_two_bytes_where_the_formula_counts_one() -> None:
    assert kept_terms(profile_of(Attention, with_noise)) == with_deviations(FORMULA, NOISE)
    assert sum(NOISE.values()) == 2 * SBH + ASSB


FOUR = 4  # bytes of an element in 32 bit
TORCHS_ATTENTION = {  # on a CPU it is computed in 32 bit, from copies of q, k and v; q and k are scaled before it
    "attention.qkv: addmm": -3 * TWO * SBH,
    "attention: mul.Scalar": 2 * FOUR * SBH,
    "attention: _to_copy": FOUR * SBH,
    "attention: _softmax": -TWO * ASSB,
    "attention: _safe_softmax": FOUR * ASSB,
    "attention: native_dropout[1]": -MASK * ASSB,
    "attention: empty_like": FOUR * ASSB,
    "attention: native_dropout": -TWO * ASSB,
    "attention: mul.Tensor": FOUR * ASSB,
}


def test_torchs_own_attention_keeps_32_bit_on_a_cpu() -> None:
    assert kept_terms(profile_of(TorchAttention, with_a_mask)) == with_deviations(FORMULA, TORCHS_ATTENTION)
    assert sum(TORCHS_ATTENTION.values()) == 6 * SBH + 7 * ASSB
