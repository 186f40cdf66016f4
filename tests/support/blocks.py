"""Small models that the tests of semantics share, and the two ways to put a policy on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.runs import note_run, runs_of

MAX_TOKENS = 64
ENGINES = ("rerun", "replay")
APPLY = ("apply, rerun", "apply, replay")  # one entry for each engine
ENTRIES = (*APPLY, "context_fn", "context_fn with module")  # the last two under torch.utils.checkpoint


def policy(*rules: Mapping[str, Any], default: str = "recompute", **more: Any) -> dict[str, Any]:
    """A policy as a mapping, as YAML would give it; each rule gets the id `rule-<its position>`."""
    listed = [{"id": f"rule-{index}", **rule} for index, rule in enumerate(rules)]
    return {"schema": "sac/v1", "name": "test", "default": default, **({"rules": listed} if listed else {}), **more}


def save(ops: str | list[str], **matchers: Any) -> dict[str, Any]:
    """A rule that saves."""
    return {"ops": ops, **matchers, "do": "save"}


def alternate(ops: str | list[str], **matchers: Any) -> dict[str, Any]:
    """A rule that saves its 1st, 3rd, 5th … match."""
    return {"ops": ops, **matchers, "do": "alternate"}


def whole(module: str, do: str = "save", **matchers: Any) -> dict[str, Any]:
    """A rule on whole modules."""
    return {"module": module, **matchers, "do": do}


def selective(written: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The config value for a policy on the blocks of a `Stack`."""
    return {"mode": "selective", "policy": dict(written), "blocks": ["blocks.*"], **more}


FULL = {"mode": "full", "blocks": ["blocks.*"]}


def ways(values: Mapping[str, Any], entries: tuple[str, ...] = ENTRIES) -> list[tuple[str, str]]:
    """Each value's name with each entry that takes it: full needs no engine, and has no context_fn."""
    return [(name, entry) for name in values for entry in (entries if values[name] != FULL else ("apply",))]


def under_each_engine(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name, those in mode selective once for each engine."""
    chosen = {}
    for name, value in values.items():
        if value == FULL:
            chosen[name] = value
        else:
            chosen |= {f"{name}, {engine}": {**value, "engine": engine} for engine in ENGINES}
    return chosen


class Stack(nn.Module):
    """Blocks one after the other; a block's outputs are the next one's inputs.

    `context_fns` holds one context function per block when the blocks run under torch.utils.checkpoint.
    """

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.context_fns: list[Callable[[], Any]] | None = None

    def forward(self, *values: Tensor) -> Any:
        result: Any = values
        for index, block in enumerate(self.blocks):
            call = functools.partial(self._call, index, block)
            result = call(*result) if isinstance(result, tuple) else call(result)
        return result

    def _call(self, index: int, block: nn.Module, *values: Tensor) -> Any:
        if self.context_fns is None:
            return block(*values)
        return checkpoint(block, *values, use_reentrant=False, context_fn=self.context_fns[index])


def install(model: Stack, value: Any, entry: str = "apply") -> Stack:
    """Put a config value on the model through `entry`: one of `ENTRIES`, or "apply", which leaves the engine to us."""
    if entry == "apply":
        return sac.apply(model, value)
    if entry in APPLY:
        return sac.apply(model, {**value, "engine": entry.removeprefix("apply, ")})
    knows_module = entry == "context_fn with module"
    model.context_fns = [
        sac.context_fn(value["policy"], module=block if knows_module else None) for block in model.blocks
    ]
    return model


class FunctionBlock(nn.Module):
    """A region whose body is a plain function of the block and its inputs, with two square weights `a` and `b`."""

    def __init__(self, body: Callable[..., Any], width: int = 8, **children: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.a = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.b = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.generator: torch.Generator | None = None
        self.calls = 0  # how often the body was run as the region can tell: what a recomputation puts back
        for name, child in children.items():
            self.add_module(name, child)

    @property
    def runs(self) -> int:
        """How often the body was run, recomputation included."""
        return runs_of(self)

    def forward(self, *values: Tensor) -> Any:
        note_run(self)
        self.calls += 1
        return self.body(self, *values)


class RootMeanSquareNorm(nn.Module):
    """RMSNorm written out op by op, as the published Llama models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.weight * (x_BTD * torch.rsqrt(x_BTD.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary position embedding of the last dimension."""
    low, high = x_BHTK.chunk(2, -1)
    return x_BHTK * cos_TK + torch.cat((-high, low), -1) * sin_TK


class Attention(nn.Module):
    """Causal attention with rotary positions; `dropout` is the probability inside SDPA.

    `kv_heads`, if there are fewer: several heads share one key and one value.
    """

    def __init__(self, width: int, heads: int, kv_heads: int = 0) -> None:
        super().__init__()
        self.heads, self.size, self.dropout = heads, width // heads, 0.0
        self.is_grouped, of_kv = kv_heads > 0, (kv_heads or heads) * self.size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, of_kv, bias=False)
        self.v_proj = nn.Linear(width, of_kv, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        frequencies = 1.0 / 10000 ** (torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(MAX_TOKENS), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, width = x_BTD.shape
        q, k, v = (
            project(x_BTD).view(batch, tokens, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (table[:tokens].to(q.dtype) for table in (self.cos, self.sin))
        q, k, dropout = rotate(q, cos, sin), rotate(k, cos, sin), self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.is_grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class LlamaLikeBlock(nn.Module):
    """One pre-norm decoder block: RMSNorm, rotary attention, RMSNorm, SwiGLU, with a dropout before each residual."""

    def __init__(self, d: int = 32, heads: int = 4, hidden: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RootMeanSquareNorm(d)
        self.self_attn = Attention(d, heads)
        self.post_attention_layernorm = RootMeanSquareNorm(d)
        self.mlp = GatedMLP(d, hidden or 2 * d)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = x_BTD + self._dropped(self.self_attn(self.input_layernorm(x_BTD)))
        return h_BTD + self._dropped(self.mlp(self.post_attention_layernorm(h_BTD)))

    def _dropped(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(x_BTD) if self.dropout.p else x_BTD


def with_dropout(model: nn.Module, p: float = 0.1, attention: float = 0.0) -> nn.Module:
    """Turn every dropout of the model on, and attention's own when asked for; return the model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        if isinstance(module, Attention):
            module.dropout = attention
    return model


def llama_stack(blocks: int = 2, d: int = 32, heads: int = 4) -> Stack:
    """A stack of Llama-like blocks without dropout."""
    return Stack(*(LlamaLikeBlock(d, heads) for _ in range(blocks)))


def tokens(device: str = "cpu", batch: int = 2, length: int = 8, d: int = 32) -> tuple[Tensor, ...]:
    """One batch of embeddings for a stack of Llama-like blocks."""
    return (torch.randn(batch, length, d, device=device),)


def square(device: str = "cpu", width: int = 8) -> tuple[Tensor, ...]:
    """One square matrix, the input of a `FunctionBlock`."""
    return (torch.randn(width, width, device=device),)
