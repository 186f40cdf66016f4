"""One model under several modes, at any batch: peak memory, step time, gradients.

All modes train the same parameters with the same optimizer: their models are copies that share them. The learning rate
is 0, so that every step of every mode begins where the others did.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

import sac
from sac.memory_timeline import measure_memory
from sac.tools.comparison import NONE, forward_backward, inputs_on
from sac.tools.models import Inputs, Scale, batches_of, build_from_config

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SEED = 0
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A published config, cut to some layers a stack and to an alphabet of bytes; `seq` tokens make a row.

    A row of an encoder-decoder has `seq` tokens for the encoder and as many for the decoder.
    """

    key: str
    config: str
    layers: int
    seq: int

    @property
    def label(self) -> str:
        return f"{self.config.removesuffix('.json')}, {self.layers} layer(s) a stack, {self.seq} tokens a row"


class Trials:
    """The models of one case, and what one training step of each takes."""

    def __init__(self, case: Case, modes: list[str], device: str = "cpu") -> None:
        self.device = device
        self.scale = Scale(layers=case.layers, seq=case.seq, vocab=256)
        model = build_from_config(str(EXAMPLES / case.config), self.scale).model.to(device)
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, weight_decay=0.0)
        shared: dict[int, object] = {id(parameter): parameter for parameter in self.parameters}
        copies = {mode: copy.deepcopy(model, dict(shared)) for mode in modes if mode != NONE}
        self.models: dict[str, nn.Module] = {NONE: model}
        self.models |= {mode: sac.apply(copied, mode) for mode, copied in copies.items()}
        for mode in self.models:
            for _ in range(WARM_UP_STEPS):
                self._step(mode, self._inputs(1))

    @property
    def held_bytes(self) -> int:
        """Weights, buffers and the state of the optimizer: alive before, in and after every step."""
        state = chain.from_iterable(values.values() for values in self.optimizer.state.values())
        held = chain(self.parameters, self.models[NONE].buffers(), state)
        return sum(tensor.untyped_storage().nbytes() for tensor in held if isinstance(tensor, Tensor))

    @property
    def gradient_bytes(self) -> int:
        """All gradients: alive at the end of each backward."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def peak_bytes(self, mode: str, batch: int) -> int:
        """The most bytes alive in one training step, with all that is held at the same time."""
        inputs = self._inputs(batch)
        step = partial(self._step, mode, inputs)
        return self.held_bytes + measure_memory(step, self.device).peak_bytes

    def seconds(self, mode: str, batch: int) -> float:
        """The time of one training step: of this process's CPU with one thread, else by the clock on the wall."""
        inputs = self._inputs(batch)
        clock = clock_of(self.device)
        self._synchronize()
        started = clock()
        self._step(mode, inputs)
        self._synchronize()
        return clock() - started

    def gradients(self, mode: str, batch: int) -> list[Tensor | None]:
        """Those of one forward and backward."""
        forward_backward(self.models[mode], self._inputs(batch))
        found = [parameter.grad for parameter in self.parameters]
        self.optimizer.zero_grad()
        return found

    def _inputs(self, batch: int) -> Inputs:
        text = str(EXAMPLES / "text.txt")
        of_step = batches_of(self.models[NONE], replace(self.scale, batch=batch), text_path=text, seed=SEED)
        torch.manual_seed(SEED)  # dropout draws the same numbers in every mode
        return inputs_on(self.device, of_step(0))

    def _step(self, mode: str, inputs: Inputs) -> None:
        forward_backward(self.models[mode], inputs)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)


def clock_of(device: str) -> Callable[[], float]:
    return time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def interleaved(trials: Trials, batches: dict[str, int], rounds: int) -> Iterator[dict[str, float]]:
    """Seconds of one step of each mode at its batch, round by round; another mode begins each round."""
    order = list(batches)
    for index in range(rounds):
        turn = index % len(order)
        yield {mode: trials.seconds(mode, batches[mode]) for mode in order[turn:] + order[:turn]}
