"""An own training loop with activation checkpointing, a memory budget, and a training that is taken up again.

    python examples/training_loop.py --checkpointing selective
    python examples/training_loop.py --checkpointing full --steps 10 --state state.pt     # stops in the middle,
    python examples/training_loop.py --checkpointing full --steps 20 --state state.pt     # and goes on
    python examples/training_loop.py --budget 50%

Every line printed is the same for each value: activation checkpointing changes memory and time, not the training.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import sac

TEXT = Path(__file__).parent / "text.txt"


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; x has the shape (batch, tokens, width)."""
        query, key, value = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm_2(x)))), 0.1, self.training)


class Transformer(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each next byte; tokens has the shape (batch, tokens)."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(step: int, rows: int = 4, length: int = 64) -> Tensor:
    """Return the bytes of a step's batch."""
    text = torch.tensor(list(TEXT.read_bytes()))
    starts = torch.randint(len(text) - length, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + length] for start in starts.tolist()])


def small(layers: int = 2, batch: int = 4, seq: int = 64) -> tuple[Transformer, tuple[Tensor]]:
    """Return a model and its inputs, for `sac compare --model sac.examples.training_loop:small`."""
    return Transformer(layers=layers), (batch_of(0, batch, seq),)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return the losses of the steps that this run has made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpointing", default="selective", help="none, full, selective, a policy's name or file")
    parser.add_argument("--budget", help='plan a policy for this peak of one step instead: "40GiB", "50%%"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--state", type=Path, help="go on from this file if it exists, and write it at the end")
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    value = arguments.checkpointing
    if arguments.budget:
        value = sac.plan(model, (batch_of(0),), arguments.budget, optimizer=optimizer)
        print(value.table())
    sac.apply(model, value)

    first = 0
    if arguments.state and arguments.state.exists():
        state = torch.load(arguments.state)
        model.load_state_dict(state["model"])  # names are those without sac: any mode can load it
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        first = state["step"]
    losses = []
    for step in range(first, arguments.steps):
        loss = model(batch_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.4f}")
    if arguments.state:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": arguments.steps}
        torch.save({**state, "random": torch.get_rng_state()}, arguments.state)
    print(sac.report(model))
    return losses


if __name__ == "__main__":
    main()
