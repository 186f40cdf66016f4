"""One block of a 70B model, as torchtitan and torchtune write it: its profile on an H100, and what baselines keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sac.blocks.find import find_blocks
from sac.planner.cost import ATTENTIONS, entry_times, op_class
from sac.planner.devices import device_named
from sac.planner.fakes import fake_mode
from sac.planner.live_bytes import Ledger
from sac.planner.pareto import SaveOption, pareto, priced
from sac.planner.planning import lowered
from sac.planner.profile import RegionProfile
from sac.planner.tracing import profile_regions

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """A block's sizes: those of Llama-3.1-70B with a sequence of 8192 tokens, if not told otherwise."""

    hidden: int = 8192
    ffn: int = 28672
    heads: int = 64
    kv_heads: int = 8
    sequence: int = 8192

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def rotated(x_BTHD: Tensor, angles_TD: Tensor, *, as_complex: bool) -> Tensor:
    """Rotary positions, in complex numbers (torchtitan) or in real ones of 32 bit (torchtune, gpt-fast)."""
    pairs = x_BTHD.float().reshape(*x_BTHD.shape[:-1], -1, 2)
    if as_complex:
        return torch.view_as_real(torch.view_as_complex(pairs) * angles_TD).flatten(3).type_as(x_BTHD)
    cos, sin = angles_TD.real, angles_TD.imag
    first, second = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.flatten(3).type_as(x_BTHD)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, *, as_complex: bool) -> None:
        super().__init__()
        self.sizes, self.as_complex = sizes, as_complex
        narrow = sizes.kv_heads * sizes.head
        self.wq = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.wk = nn.Linear(sizes.hidden, narrow, bias=False)
        self.wv = nn.Linear(sizes.hidden, narrow, bias=False)
        self.wo = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.sizes.head)) for w in (self.wq, self.wk, self.wv))
        q, k = (rotated(part, angles, as_complex=self.as_complex) for part in (q, k))
        heads = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w2 = nn.Linear(sizes.ffn, sizes.hidden, bias=False)
        self.w3 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, *, as_complex: bool) -> None:
        super().__init__()
        self.attention = Attention(sizes, as_complex=as_complex)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(sizes.hidden, eps=1e-5)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Stack(nn.Module):
    """Two blocks, so that they are found as such."""

    def __init__(self, sizes: Sizes, *, as_complex: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(sizes, as_complex=as_complex) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, angles)
        return x


def built(sizes: Sizes, *, as_complex: bool) -> tuple[Stack, tuple[Tensor, Tensor]]:
    """The stack in bfloat16 and its inputs, without data."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with fake_mode():
            x = torch.empty(1, sizes.sequence, sizes.hidden, requires_grad=True)
            angles = torch.empty(sizes.sequence, 1, sizes.head // 2, dtype=torch.complex64)
            return Stack(sizes, as_complex=as_complex), (x, angles)
    finally:
        torch.set_default_dtype(before)


def profiled(sizes: Sizes, *, as_complex: bool) -> tuple[RegionProfile, tuple[float, ...]]:
    """The profile of a block as an H100 runs it, and the seconds of each of its ops."""
    device = device_named("h100")

    def work(_: Any) -> tuple[RegionProfile, tuple[float, ...]]:
        model, inputs = built(sizes, as_complex=as_complex)
        with Ledger(512, on_host=False):
            [profile] = profile_regions(find_blocks(model), lambda: model(*inputs))
        return profile, tuple(entry_times(profile, device))

    return lowered(work, device)


# The anchors: at so many MiB a layer, at most this share of the time of a baseline.
ANCHORS = ((864, "attention + every 2nd matmul", 0.84), (978, "attention + every 2nd matmul", 0.74),
           (1442, "attention + all matmuls", 0.45), (1570, "attention + all matmuls", 0.41))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Baseline:
    """What torch's own selective checkpointing holds beyond the region's input, and what it runs again.

    It holds all results of saved ops, read or not, and runs everything else again up to the last that backward needs.
    ``replayed``: the seconds if dead ops are not run.
    """

    label: str
    bytes: int
    seconds: float
    replayed: float


def baselines(profile: RegionProfile, times: Sequence[float]) -> list[Baseline]:
    products = [entry.number for entry in profile.entries if entry.op.startswith("aten.mm.")]
    attention = [entry.number for entry in profile.entries if op_class(entry) in ATTENTIONS]
    ways = {
        "full": [],
        "attention": attention,
        "attention + every 2nd matmul": [*attention, *products[::2]],
        "attention + all matmuls": [*attention, *products],
    }
    found = []
    for label, saved in ways.items():
        held = {profile.roots[value] for number in saved for value in profile.entries[number].makes}
        found.append(
            Baseline(
                label,
                sum(profile.bytes[root] for root in held),
                priced(profile, times, saved, "rerun").seconds,
                priced(profile, times, saved, "replay").seconds,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Met:
    """One anchor: the fastest save option within its bytes, next to what it is measured against."""

    mib: int
    counts_input: bool
    keep: SaveOption
    baseline: Baseline
    limit: float

    @property
    def ratio(self) -> float:
        return self.keep.seconds / self.baseline.seconds

    @property
    def holds(self) -> bool:
        return self.ratio <= self.limit


def anchors(profile: RegionProfile, times: Sequence[float], input_bytes: int) -> list[Met]:
    """All anchors, with the region's input counted among the bytes and without. Figures are whole MiB: so are ours."""
    front = pareto(profile, times)
    known = {one.label: one for one in baselines(profile, times)}
    found = []
    for counts_input in (False, True):
        for mib, label, limit in ANCHORS:
            room = mib - (input_bytes // MIB if counts_input else 0)
            keep = [one for one in front if round(one.bytes / MIB) <= room][-1]
            found.append(Met(mib, counts_input, keep, known[label], limit))
    return found


def again(profile: RegionProfile, keep: SaveOption) -> int:
    """How many ops with a kernel of their own run again under replay."""
    return sum(not profile.entries[number].is_view for number in profile.recomputed(keep.saved).entries)
