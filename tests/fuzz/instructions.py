"""What a random program is made of: each instruction maps values of 8×8 elements to one of 8×8 elements.

An instruction is given the block (its weights and generator), its place in the program, a small number to vary by,
and one or two values. Values may be views, of any floating type, and may need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.functions import FUNCTIONS
from tests.support import custom_ops

WIDTH = 8
Instruction = Callable[..., Tensor]


def drawn_by_generator(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    return x * torch.rand(WIDTH, WIDTH, generator=block.generator, device=x.device)


def shuffled_by_generator(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    return x[torch.randperm(WIDTH, generator=block.generator, device=x.device)]


def sampled(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    return x.gather(1, torch.multinomial(x.detach().float().tanh().exp(), WIDTH, replacement=True))


def heads(x: Tensor) -> Tensor:
    return x.reshape(1, WIDTH, 2, WIDTH // 2).transpose(1, 2)


def attention(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    y = y.to(x.dtype)
    dropout = (0.0, 0.3)[knob % 2]
    mixed = F.scaled_dot_product_attention(heads(x), heads(y), heads(x), dropout_p=dropout, is_causal=knob % 3 == 0)
    return mixed.transpose(1, 2).reshape(WIDTH, WIDTH)


def noisy_attention(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    return custom_ops.noisy_attention(x, y.to(x.dtype).tanh(), x, 0.4)[0]


def one_column(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    return (x @ block.weights[0]).select(1, knob % WIDTH).unsqueeze(1).expand(-1, WIDTH) + y


def halves(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=knob % 2)
    return torch.cat((right.sin(), left), knob % 2)


def rows(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    return torch.stack([row.sin() if index % 2 else row for index, row in enumerate(x.unbind(0))][::-1])


def add_in_place(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    fresh = x @ block.weights[knob % 3]
    return fresh.add_(y.to(fresh.dtype)).mul_(0.5)


def add_through_view(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    fresh = y.sin() + x @ block.weights[knob % 3]
    fresh[:, : 1 + knob % WIDTH].add_(1)
    fresh.t().mul_(0.5)
    return fresh


def assigned_rows(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    fresh = (x * 1.5).clone()
    fresh[: 1 + knob % WIDTH] = y[: 1 + knob % WIDTH].to(fresh.dtype)
    return fresh


def accumulated(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    total += x
    total.add_(y.to(total.dtype), alpha=0.5)
    return total


def written_without_grad(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    scale = torch.empty_like(x, requires_grad=False)
    with torch.no_grad():
        torch.mul(x.detach(), 0.5, out=scale)
        if knob % 2:
            torch.ops.sactest.fill_tanh(x.detach(), scale)
    return scale * y


def largest(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    values, indices = x.topk(3, dim=1)
    return torch.zeros_like(x).scatter(1, indices, values) + y


def routed_in_place(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    """As routers of experts do: what they have chosen is made to sum to one where it lies."""
    values, indices = x.float().softmax(-1).topk(3, dim=1)
    values /= values.sum(-1, keepdim=True)
    return y.gather(1, indices).repeat(1, 3)[:, :WIDTH] * values.repeat(1, 3)[:, :WIDTH]


def ordered(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    values, order = x.sort(dim=knob % 2, descending=bool(knob % 3))
    return values * y.gather(knob % 2, order)


def row_maximum(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    values, indices = x.max(1, keepdim=True)
    return y * values + indices


def standardized(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, 1, keepdim=True)
    return (y - mean) * torch.rsqrt(variance + 1)


def positive_part(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    where = (x > 0.1 * knob).nonzero(as_tuple=True)
    return y + x[where].sum()


def read_back(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    return y * (0.5 if x.detach().float().mean().item() > 0 else 0.25)


def each(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    doubled, halved = torch._foreach_mul([x, y], [2.0, 0.5])
    return doubled + halved


def without_grad(block: Any, at: int, knob: int, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = F.dropout(x @ block.weights[1], 0.3).tanh()
    return y * scale


def in_lower_precision(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        h = x @ block.weights[knob % 3]
    return h.float()


def logged(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    with torch.profiler.record_function("logged"):
        return x.sin()


def batch_normed(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    return block.batch_norms[str(at)](x.float())


ONE: dict[str, Instruction] = {
    "matmul by weight": lambda block, at, knob, x: x @ block.weights[knob % 3],
    "linear": lambda block, at, knob, x: block.linears[knob % 2](x.to(block.linears[0].weight.dtype)),
    "sine": lambda block, at, knob, x: x.sin(),
    "gelu": lambda block, at, knob, x: F.gelu(x),
    "softmax": lambda block, at, knob, x: x.softmax(-1),
    "rms norm": lambda block, at, knob, x: F.rms_norm(x.float(), (WIDTH,), block.scale),
    "layer norm": lambda block, at, knob, x: F.layer_norm(x.float(), (WIDTH,), block.scale, block.shift),
    "batch norm": batch_normed,
    "dropout": lambda block, at, knob, x: F.dropout(x, 0.3),
    "dropout in place": lambda block, at, knob, x: F.dropout(x @ block.weights[knob % 3], 0.3, inplace=True),
    "native dropout": lambda block, at, knob, x: torch.native_dropout(x, 0.3, True)[0],
    "alpha dropout": lambda block, at, knob, x: F.alpha_dropout(x, 0.3, training=True),
    "randomized relu": lambda block, at, knob, x: F.rrelu(x, training=True),
    "random like": lambda block, at, knob, x: x + torch.rand_like(x),
    "bernoulli": lambda block, at, knob, x: x * torch.bernoulli(torch.full_like(x.detach(), 0.6)),
    "normal in place": lambda block, at, knob, x: x + torch.empty_like(x).normal_(),
    "permuted": lambda block, at, knob, x: x[torch.randperm(WIDTH, device=x.device)],
    "sampled": sampled,
    "drawn by generator": drawn_by_generator,
    "shuffled by generator": shuffled_by_generator,
    "transposed": lambda block, at, knob, x: x.t(),
    "reshaped": lambda block, at, knob, x: x.reshape(2, 4, WIDTH).transpose(0, 1).reshape(WIDTH, WIDTH),
    "flipped": lambda block, at, knob, x: x.flip(knob % 2),
    "detached": lambda block, at, knob, x: x.detach(),
    "halves": halves,
    "rows": rows,
    "in lower precision": in_lower_precision,
    "logged": logged,
    "tanh by raw kernel": lambda block, at, knob, x: custom_ops.TanhByRawKernel.apply(x),
    "square by accumulation": lambda block, at, knob, x: custom_ops.SquareByAccumulation.apply(x.tanh()),
    "tanh by out-variant": lambda block, at, knob, x: custom_ops.TanhByOutVariant.apply(x),
    "noisy scale": lambda block, at, knob, x: custom_ops.noisy_scale(x, 0.4)[0],
    "scaled": lambda block, at, knob, x: custom_ops.scale_by(x, 0.5 + knob),
    **FUNCTIONS,
}
TWO: dict[str, Instruction] = {
    "matmul": lambda block, at, knob, x, y: 0.3 * (x @ y.to(x.dtype)),
    "bmm": lambda block, at, knob, x, y: 0.3 * torch.bmm(x[None], y.to(x.dtype)[None])[0],
    "addmm": lambda block, at, knob, x, y: torch.addmm(x, y.to(x.dtype), block.weights[knob % 3].to(x.dtype)),
    "add": lambda block, at, knob, x, y: x + y,
    "bounded product": lambda block, at, knob, x, y: x * y.sin(),
    "chosen": lambda block, at, knob, x, y: torch.where(x > 0, x, y.to(x.dtype)),
    "attention": attention,
    "noisy attention": noisy_attention,
    "one column": one_column,
    "add in place": add_in_place,
    "add through view": add_through_view,
    "assigned rows": assigned_rows,
    "accumulated": accumulated,
    "written without grad": written_without_grad,
    "largest": largest,
    "routed in place": routed_in_place,
    "ordered": ordered,
    "row maximum": row_maximum,
    "standardized": standardized,
    "positive part": positive_part,
    "read back": read_back,
    "each": each,
    "without grad": without_grad,
}
# torch.utils.checkpoint hands a saved tensor out once, so this one is for sac.apply alone
READ_TWICE = {"read twice": lambda block, at, knob, x: custom_ops.SineReadTwice.apply(x)}
INSTRUCTIONS: dict[str, Instruction] = {**ONE, **TWO, **READ_TWICE}


def operands_of(name: str) -> int:
    """How many values the instruction takes."""
    return 2 if name in TWO else 1


def batch_norm() -> nn.Module:
    """The state of one `batch norm` instruction."""
    return nn.BatchNorm1d(WIDTH)
