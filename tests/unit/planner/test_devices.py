"""The table of devices: names, figures, and the device at hand."""

from __future__ import annotations

import pytest
import torch

from sac.errors import PlanError
from sac.planner.cost import DEVICES, device_named, figures_of


@pytest.mark.parametrize(
    ("text", "name"),
    [("H-100", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H200", "h200"), ("AMD Instinct MI300X", "mi300x")],
)
def test_device_is_found_by_its_names(text: str, name: str) -> None:
    assert device_named(text).name == name


@pytest.mark.parametrize("text", ["NVIDIA A100-PCIE-40GB", "NVIDIA H100 PCIe", "h1000", "tpu"])
def test_other_devices_are_errors_that_list_the_known_ones(text: str) -> None:
    with pytest.raises(PlanError, match="the planner has no figures for") as raised:
        device_named(text)
    assert all(name in str(raised.value) for name in DEVICES)


def test_dtype_without_a_figure_has_that_of_float32() -> None:
    h100 = DEVICES["h100"]
    assert h100.peak("int32") == h100.peak("float32") < h100.peak("bfloat16") < h100.peak("float8_e4m3fn")


def test_figures_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert figures_of(torch.device("cpu")) is DEVICES["cpu"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert figures_of(torch.device("cuda", 0)) == DEVICES["h100"]
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert figures_of(torch.device("cuda", 0)).peak("float32") == DEVICES["h100"].flops_per_s["tf32"]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
