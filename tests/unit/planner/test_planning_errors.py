"""What sac.plan says when it can make no plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import ModelError, PlanError
from sac.planner.budget import read_budget
from sac.planner.plan_file import make_plan
from sac.planner.prepare import prepare
from sac.policy.read import LEGAL_BYTES
from tests.unit.planner.small_model import DIM, INPUTS, Block, Model, stops


def error_of(
    model: Any, inputs: Any = INPUTS, budget: Any = "50%", kind: type[Exception] = PlanError, **more: Any
) -> str:
    with pytest.raises(kind) as error:
        sac.plan(model, inputs, budget, **more)
    return str(error.value)


def test_a_budget_below_the_least_peak() -> None:
    model = Model()
    made = make_plan(prepare(model, INPUTS), "0%")
    text = error_of(model, budget=1000)
    assert text.startswith("budget: 1000 B is below the least peak of this model and these inputs, ")
    assert f"{made.static / 1024:.1f} KiB are parameters, buffers, inputs and optimizer state; the peak is " in text
    assert text.endswith(
        f"\n    legal: {made.least} bytes or more"
        "\n    fix: give more, or shrink the batch, the sequence, or what checkpointing cannot: "
        "shard parameters, chunk the loss"
    )
    assert sac.plan(model, INPUTS, made.least)
    assert f"legal: {made.least} bytes or more" in error_of(model, budget=made.least - 1)


LEGAL = f'{LEGAL_BYTES}, or a share of the range such as "50%"'


@pytest.mark.parametrize(
    ("budget", "found"),
    [
        (0, "0 is not a budget"),
        (-5, "-5 is not a budget"),
        (True, "True is not a budget"),
        (1.5, "1.5 is not a budget"),
        (None, "None is not a budget"),
        ("101%", '"101%" is not a budget: a share is 0% to 100%'),
        ("-1%", '"-1%" is not a budget: a share is 0% to 100%'),
        ("nan%", '"nan%" is not a budget: a share is 0% to 100%'),
    ],
)
def test_what_is_no_budget(budget: Any, found: str) -> None:
    with pytest.raises(PlanError) as error:
        read_budget(budget)
    assert str(error.value) == f"budget: {found}\n    legal: {LEGAL}"


@pytest.mark.parametrize("text", ["much", "%", "half%", "", "5 parsecs"])
def test_what_is_no_budget_in_words(text: str) -> None:
    with pytest.raises(PlanError) as error:
        read_budget(text)
    assert str(error.value).startswith(f'budget: "{text}" is not a budget: ')
    assert str(error.value).endswith(f"\n    legal: {LEGAL}")


def test_a_model_that_looks_at_its_data() -> None:
    assert error_of(Model(Block(stops), Block(stops))) == (
        "Model: aten._local_scalar_dense.default needs the data of a tensor, but a plan is made on tensors without "
        "data\n    fix: plan on real tensors: sac.plan(…, real=True), or --real"
    )


def test_no_scalar_loss() -> None:
    assert error_of(Model(returns=lambda x: x)) == (
        "loss: the model returns a tensor of shape [32, 16]\n"
        "    legal: a scalar tensor that needs a gradient\n"
        "    fix: pass loss_fn=, which takes what the model returns"
    )


def test_an_optimizer_that_is_not_known() -> None:
    assert error_of(Model(), optimizer="adamx") == (
        "optimizer: 'adamx' is not known\n"
        "    did you mean: adam\n"
        "    legal: sgd, momentum, adam, adamw\n"
        "    fix: pass the optimizer itself"
    )
    assert error_of(Model(), optimizer=torch.optim.Adam) == (
        "optimizer: a type is not an optimizer\n    legal: sgd, momentum, adam, adamw, or a torch.optim.Optimizer"
    )


def test_an_optimizer_that_cannot_be_tried() -> None:
    model = Model()
    assert error_of(model, optimizer=torch.optim.LBFGS(model.parameters())) == (
        "optimizer: a step of LBFGS cannot be tried without data: "
        "TypeError: LBFGS.step() missing 1 required positional argument: 'closure'\n"
        "    fix: name one that has as many states (sgd, momentum, adam, adamw), or give none and leave room"
    )


def test_a_device_that_is_not_known() -> None:
    text = error_of(Model(), device="tpu9")
    assert text.startswith("device: ")
    assert "tpu9" in text
    assert "h100" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda")])
def test_a_gpu_that_is_not_there(device: Any) -> None:
    text = error_of(Model(), device=device)
    assert text.startswith(f"device: torch cannot use {device} here: ")
    assert text.endswith('\n    fix: name the GPU, such as "h100"')


def test_an_engine_that_is_not_known() -> None:
    assert error_of(Model(), engine="reply", kind=sac.SacError) == (
        "activation_checkpointing.engine: 'reply' is not an engine\n"
        "    did you mean: replay\n"
        "    legal: auto, rerun, replay"
    )


def test_a_model_that_sac_is_on() -> None:
    model = sac.apply(Model(), "full")
    assert error_of(model, kind=ModelError) == "Model: sac is on this model\n    fix: call sac.remove(model) first"


def test_what_is_no_model() -> None:
    assert error_of(3, kind=ModelError) == "model: a int is not a torch.nn.Module"


def test_a_frozen_model() -> None:
    model = Model()
    model.requires_grad_(False)
    assert error_of(model, kind=ModelError) == ("Model: every block of this model is frozen: there is nothing to plan")


def test_a_frozen_model_that_is_given_what_is_trained() -> None:
    """A prompt that is tuned, say."""
    model = Model().requires_grad_(False)
    assert sac.plan(model, {"x": INPUTS[0].clone().requires_grad_()}, "50%")


def test_blocks_that_are_not_called() -> None:
    class Elsewhere(Model):
        def forward(self, x: Tensor) -> Any:
            return self.first(x).sum()

    assert error_of(Elsewhere(), kind=ModelError) == (
        "Elsewhere: no block of this model is called with gradients: there is nothing to plan"
    )


def test_blocks_that_are_left_out_at_random() -> None:
    class Dropping(Model):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            for block in [*self.blocks][: 1 + self.calls % 2]:
                x = block(x)
            return x.sum()

    assert error_of(Dropping()) == (
        "blocks: call 2 is of blocks.1 in one step and of no block in another\n"
        "    fix: turn off what leaves layers out at random (layerdrop, stochastic depth) while the plan is made"
    )


def test_a_model_that_cannot_be_copied() -> None:
    class Handle:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle 'handle' object")

    model = Model()
    model.handle = Handle()
    for real in (False, True):
        assert error_of(model, real=real) == (
            "Model: the model cannot be copied: TypeError: cannot pickle 'handle' object\n"
            "    fix: plan the model before it is sharded"
        )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(DIM), nn.LSTM(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


@pytest.mark.parametrize("real", [False, True])
def test_an_op_that_tells_no_sizes(real: bool) -> None:
    """Its backward on tensors without data would end the process."""
    assert error_of(Model(Recurrent(), Recurrent()), real=real) == (
        "aten.mkldnn_rnn_layer.default: how many bytes its kernel packs for backward is not known, so the peak cannot "
        "be computed\n    fix: use mode: full, or a policy by hand"
    )


def test_inputs_that_are_neither_a_tuple_nor_a_dict() -> None:
    for inputs, kind in ((INPUTS[0], "Tensor"), (None, "NoneType")):
        assert error_of(Model(), inputs=inputs) == (
            f"inputs: a {kind} is not what a model is called with\n"
            "    legal: a tuple or a dict of arguments\n"
            "    fix: write (x,) for one argument"
        )


def test_inputs_of_the_wrong_shape() -> None:
    text = error_of(Model(), inputs=(torch.zeros(4, DIM + 1),))
    assert text.startswith("Model: its forward does not run with these inputs: RuntimeError: ")
    text = error_of(Model(), inputs={"y": torch.zeros(4, DIM)})
    assert text.startswith("Model: its forward does not run with these inputs: TypeError: ")
    assert "unexpected keyword argument 'y'" in text


def test_a_block_that_cannot_be_replayed() -> None:
    def unwritten(x: Tensor) -> Tensor:
        return x + torch.empty_like(x) * 0

    model = Model(Block(unwritten), Block(unwritten))
    assert error_of(model, real=True) == (
        "Model: its blocks cannot be planned op by op: aten.mul.Tensor reads memory that no op has "
        "written to\n"
        "    fix: use mode: full, or a policy by hand"
    )


def test_arguments_of_other_kinds() -> None:
    assert error_of(Model(), loss_fn=3) == "loss_fn: a int cannot be called\n    legal: a function of the output"
    assert error_of(Model(), device=3) == (
        "device: 3 names no device\n    legal: a name such as h100, or a torch.device"
    )
