"""Lightning with activation checkpointing, a memory budget, and a training that is taken up again.

python examples/lightning_fit.py --checkpointing selective --out out/lightning
python examples/lightning_fit.py --checkpointing selective --out out/lightning --resume
python examples/lightning_fit.py --budget 50% --out out/lightning
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sac
from sac.compat.lightning import SacCallback

TEXT = Path(__file__).parent / "text.txt"
WIDTH, LAYERS = 64, 2


class Model(lightning.LightningModule):
    """A language model over bytes; it knows nothing of sac."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each next byte; tokens has the shape (batch, tokens)."""
        x = self.embed(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the loss of a batch."""
        loss = self(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return the losses of the steps that this run has made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpointing", default="selective", help="none, full, selective, a policy's name or file")
    parser.add_argument("--budget", help='plan a policy for this peak of one step instead: "40GiB", "50%%"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the checkpoint and the logs")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    arguments = parser.parse_args(argv)

    lightning.seed_everything(0, verbose=False)
    model = Model()
    text = torch.tensor(list(TEXT.read_bytes()))
    data = DataLoader(text[: len(text) // 64 * 64].view(-1, 64), batch_size=4)
    value = arguments.checkpointing
    if arguments.budget:
        value = sac.plan(model, (next(iter(data)),), arguments.budget, optimizer="adamw")

    last = arguments.out / "last.ckpt"
    trainer = lightning.Trainer(
        max_steps=arguments.steps, callbacks=[SacCallback(value, log_every=10)], logger=CSVLogger(arguments.out),
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accelerator="auto", devices=1,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=last if arguments.resume else None)
    trainer.save_checkpoint(last)
    print(sac.report(model))
    return model.losses


if __name__ == "__main__":
    main()
