"""A diffusion transformer of diffusers with activation checkpointing, a memory budget, and a training taken up again.

    python examples/diffusion_transformer.py --checkpointing selective
    python examples/diffusion_transformer.py --checkpointing full --steps 10 --state state.pt     # stops in the middle,
    python examples/diffusion_transformer.py --checkpointing full --steps 20 --state state.pt     # and goes on
    python examples/diffusion_transformer.py --budget 50%

The model is a small Stable Diffusion 3 with random weights; it learns to predict the velocity from noise to latents
(flow matching). Real latents and text embeddings would come from an autoencoder and text encoders.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

import sac

ROWS, CHANNELS, SIZE, TOKENS, WIDTH = 4, 4, 16, 8, 64


def transformer() -> nn.Module:
    """Return the model: blocks over the patches of an image and the tokens of its caption."""
    return SD3Transformer2DModel(
        sample_size=SIZE, patch_size=2, in_channels=CHANNELS, out_channels=CHANNELS, num_layers=2,
        num_attention_heads=4, attention_head_dim=WIDTH // 4, joint_attention_dim=WIDTH, caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH, pos_embed_max_size=SIZE,
    )  # fmt: skip


def batch_of(step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arguments of the model for a step, and the velocities that it should predict."""
    draw = torch.Generator().manual_seed(step)
    latents = torch.randn(ROWS, CHANNELS, 1, 1, generator=draw).expand(-1, -1, SIZE, SIZE)
    noise, share = torch.randn(latents.shape, generator=draw), torch.rand(ROWS, generator=draw)
    inputs = {
        "hidden_states": torch.lerp(latents, noise, share[:, None, None, None]),
        "timestep": 1000 * share,
        "encoder_hidden_states": torch.randn(ROWS, TOKENS, WIDTH, generator=draw),
        "pooled_projections": latents.mean((2, 3)).repeat(1, WIDTH // CHANNELS),
    }
    return inputs, noise - latents


def loss_of(output: Any, velocities: Tensor) -> Tensor:
    """Return the loss for what the model returns."""
    return nn.functional.mse_loss(output.sample, velocities)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return the losses of the steps that this run has made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpointing", default="selective", help="none, full, selective, a policy's name or file")
    parser.add_argument("--budget", help='plan a policy for this peak of one step instead: "40GiB", "50%%"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--state", type=Path, help="go on from this file if it exists, and write it at the end")
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    model = transformer().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    value = arguments.checkpointing
    if arguments.budget:
        inputs, velocities = batch_of(0)
        value = sac.plan(
            model, inputs, arguments.budget, optimizer=optimizer, loss_fn=lambda output: loss_of(output, velocities)
        )
        print(value.table())
    sac.apply(model, value)

    first = 0
    if arguments.state and arguments.state.exists():
        state = torch.load(arguments.state)
        model.load_state_dict(state["model"])  # names are those without sac: any mode can load it
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    losses = []
    for step in range(first, arguments.steps):
        inputs, velocities = batch_of(step)
        loss = loss_of(model(**inputs), velocities)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.4f}")
    if arguments.state:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": arguments.steps}
        torch.save(state, arguments.state)
    print(sac.report(model))
    return losses


if __name__ == "__main__":
    main()
