"""sac.apply on models in low precision by torchao: float8, microscaling, int8, NF4; and with its optimizers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import sac
from tests.stacks.composition import assert_full_and_selective
from tests.stacks.other_trainers import low_precision
from tests.support.blocks import llama_stack, policy, save, tokens
from tests.support.recording import kept_bytes

pytest.importorskip("torchao", reason="torchao is in the extra `stacks`")

from tests.stacks import low_precision as models

FLOAT8 = [name for name in models.CONVERSIONS if name.startswith("float8")]
SCALES = {"mode": "selective", "policy": policy(save("scaling"))}


@pytest.mark.parametrize(
    "conversion",
    [pytest.param(name, marks=pytest.mark.slow) if name == "mxfp8" else name for name in models.CONVERSIONS],
)
def test_gradients_are_equal_and_kept_bytes_fall(conversion: str) -> None:
    blocks = 1 if conversion == "mxfp8" else 2  # emulated: thousands of ops in each
    assert_full_and_selective(functools.partial(low_precision, conversion=conversion, blocks=blocks))


@pytest.mark.slow
def test_compiled_as_a_whole() -> None:
    """With `aot_eager`, which runs the same kernels: bit for bit the compiled model without checkpointing."""
    torch._dynamo.reset()
    assert_full_and_selective(
        functools.partial(low_precision, conversion="float8 rowwise", backend="aot_eager", blocks=1)
    )


@pytest.mark.parametrize("conversion", FLOAT8)
def test_scaling_reductions_are_not_run_again(conversion: str) -> None:
    plain, full, kept, general = (
        models.scaling_reductions(sac.apply(models.build(conversion), value))
        for value in ("none", "full", SCALES, "selective")
    )
    assert full > plain == kept == general


@pytest.mark.parametrize("conversion", FLOAT8)
def test_scales_are_small(conversion: str) -> None:
    plain, kept = (sac.apply(models.build(conversion), value) for value in ("full", SCALES))
    given = models.inputs(plain)
    spent = kept_bytes(kept, given) - kept_bytes(plain, given)
    per_row = 0 if conversion == "float8 tensorwise" else models.WIDTH + 2 * models.WIDTH
    assert 0 < spent <= 2 * models.LINEARS * 4 * (2 + per_row + 64)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantised_optimizers_step_alike(name: str) -> None:
    optimizers = pytest.importorskip("torchao.optim", reason="torchao is in the extra `stacks`")

    @torch.compiler.set_stance("force_eager")  # inductor would compile their step for each shape of a weight
    def trained(value: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = sac.apply(llama_stack(blocks=1, d=models.WIDTH), value)
        optimizer = getattr(optimizers, name)(model.parameters(), lr=1e-2)
        for _ in range(2):
            models.loss(tokens(d=models.WIDTH), model).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    start, reference = llama_stack(blocks=1, d=models.WIDTH).state_dict(), trained("none")
    assert any(not torch.equal(start[key], reference[key]) for key in reference)
    for value in ("full", "selective"):
        ours = trained(value)
        assert [key for key in reference if not torch.equal(ours[key], reference[key])] == []
