"""A tiny diffusion transformer: each block is scaled, shifted and gated by what the time of the noise gives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, PATCHES, CHANNELS = 32, 4, 16, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x_BPW: Tensor, time_BW: Tensor) -> Tensor:
        parts = self.modulation(F.silu(time_BW)).unsqueeze(1).chunk(6, dim=-1)
        shift, scale, gate, shift2, scale2, gate2 = parts
        qkv = self.qkv(self.norm1(x_BPW) * (1 + scale) + shift)
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x_BPW = x_BPW + gate * self.out(attended)
        hidden = F.gelu(self.up(self.norm2(x_BPW) * (1 + scale2) + shift2), approximate="tanh")
        result: Tensor = x_BPW + gate2 * self.down(hidden)
        return result


class DiffusionTransformer(nn.Module):
    """Predicts the noise in patches; the loss is that of the prediction."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches, self.time = nn.Linear(CHANNELS, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        x, at = self.patches(noisy), self.time(time)
        for block in self.blocks:
            x = block(x, at)
        return F.mse_loss(self.head(x), noise)


def noisy_patches() -> dict[str, Tensor]:
    """Return the inputs: patches with noise [batch, patches, channels], the time [batch, 1], and the noise."""
    seeded = torch.Generator().manual_seed(2)
    noisy, noise = (torch.randn(2, PATCHES, CHANNELS, generator=seeded) for _ in range(2))
    return {"noisy": noisy, "time": torch.rand(2, 1, generator=seeded), "noise": noise}
