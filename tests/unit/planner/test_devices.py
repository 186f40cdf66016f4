"""The figures of the devices, held against what they are made of, and how a device is named."""

import pytest
import torch

from sac.errors import PlanError
from sac.planner.devices import DEVICES, device_at_hand, device_named

GPUS = [device for device in DEVICES.values() if device.name != "cpu"]


def test_the_devices_are_those_of_the_docs():
    assert [*DEVICES] == ["a100", "h100", "h200", "b200", "mi300x", "cpu"]


@pytest.mark.parametrize(
    ("name", "dtype", "units", "multiply_adds_per_clock", "clock_hz"),
    [
        ("a100", "bfloat16", 108 * 4, 256, 1.41e9),
        ("a100", "float32", 6912, 1, 1.41e9),
        ("h100", "bfloat16", 132 * 4, 512, 1.83e9),
        ("h100", "float32", 16896, 1, 1.98e9),
        ("h200", "bfloat16", 132 * 4, 512, 1.83e9),
        ("mi300x", "bfloat16", 304 * 4, 256, 2.1e9),
        ("mi300x", "float32", 304, 128, 2.1e9),
        ("cpu", "float32", 16 * 2, 8, 2.5e9),
    ],
)
def test_a_peak_is_dense_with_two_flops_per_multiply_add(name, dtype, units, multiply_adds_per_clock, clock_hz):
    peak = units * multiply_adds_per_clock * 2 * clock_hz
    assert DEVICES[name].peak(dtype) == pytest.approx(peak, rel=0.005)


@pytest.mark.parametrize(
    ("name", "half", "tf32", "bandwidth", "gigabytes", "link"),
    [
        ("a100", 312, 156, 2.039, 80, 300),
        ("h100", 989.4, 494.7, 3.35, 80, 450),
        ("h200", 989.4, 494.7, 4.8, 141, 450),
        ("b200", 2250, 1100, 8.0, 180, 900),
        ("mi300x", 1307.4, 653.7, 5.3, 192, 448),
    ],
)
def test_figures_of_the_data_sheets(name, half, tf32, bandwidth, gigabytes, link):
    device = DEVICES[name]
    assert device.peak("bfloat16") == device.peak("float16") == pytest.approx(half * 1e12)
    assert device.peak("tf32") == pytest.approx(tf32 * 1e12)
    assert device.bytes_per_s == pytest.approx(bandwidth * 1e12)
    assert device.memory_bytes == gigabytes * 2**30
    assert device.link_bytes_per_s == pytest.approx(link * 1e9)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_units_of_a_gpu(device):
    """Half the width is twice the rate, as everywhere in the data sheets: a figure with sparsity would stand out."""
    assert device.peak("bfloat16") / device.peak("tf32") == pytest.approx(2, rel=0.03)
    if "float8" in device.flops_per_s:
        assert device.peak("float8_e4m3fn") == pytest.approx(2 * device.peak("bfloat16"), rel=0.001)
    assert device.peak("float64") <= device.peak("float32") < device.peak("tf32")
    assert 100 < device.peak("bfloat16") / device.bytes_per_s < 400  # FLOPs per byte where the two roofs meet
    assert device.link_bytes_per_s < device.bytes_per_s / 4
    assert 3e-6 <= device.launch_s <= 5e-6


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_every_device_is_found_and_says_where_its_figures_are_from(device):
    assert DEVICES[device.name] is device
    assert device_named(device.name) is device
    assert device.source
    assert hash(device) == hash(device_named(device.name))


def test_a_dtype_without_a_figure_has_that_of_float32():
    a100 = DEVICES["a100"]
    assert a100.peak("int32") == a100.peak("") == a100.peak("float8_e4m3fn") == 19.5e12


def test_tf32_takes_the_place_of_float32():
    device = DEVICES["h100"].with_tf32()
    assert device.peak("float32") == pytest.approx(494.7e12)
    assert device.peak("bfloat16") == DEVICES["h100"].peak("bfloat16")
    assert device.name == "h100"
    assert DEVICES["h100"].peak("float32") == pytest.approx(66.9e12)
    assert DEVICES["cpu"].with_tf32() is DEVICES["cpu"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "h100"),
        ("h-100", "h100"),
        ("H100-SXM5", "h100"),
        ("h100_80gb", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI300X OAM", "mi300x"),
        ("CPU", "cpu"),
    ],
)
def test_a_device_is_found_by_any_of_its_names(text, name):
    assert device_named(text).name == name


@pytest.mark.parametrize(
    "text",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H200 NVL",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA GB200",
        "NVIDIA GH200 480GB",
        "NVIDIA H800",
        "NVIDIA GeForce RTX 4090",
        "AMD Instinct MI300A",
        "AMD Instinct MI325X",
        "h1000",
        "",
    ],
)
def test_another_device_is_not_taken_for_one_of_them(text):
    with pytest.raises(PlanError):
        device_named(text)


LEGAL = (
    "a100 (NVIDIA A100 SXM, 80 GB), h100 (NVIDIA H100 SXM, 80 GB), h200 (NVIDIA H200 SXM, 141 GB), "
    "b200 (NVIDIA B200 SXM, 180 GB), mi300x (AMD Instinct MI300X, 192 GB), cpu (a processor, rough figures)"
)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("NVIDIA H100 PCIe", "    did you mean: h100\n"),
        ("mi300", "    did you mean: mi300x\n"),
        ("tpu-v5", ""),
    ],
)
def test_an_unknown_device_is_told_with_those_that_are_known(text, hint):
    with pytest.raises(PlanError) as error:
        device_named(text)
    assert str(error.value) == f"device: the planner has no figures for '{text}'\n{hint}    legal: {LEGAL}"


def test_the_processor_at_hand():
    assert device_at_hand(torch.device("cpu")).name == "cpu"


def test_the_gpu_at_hand_is_known_by_what_its_driver_calls_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: {1: "NVIDIA H200"}[device.index])
    assert device_at_hand(torch.device("cuda:1")) is DEVICES["h200"]


def test_the_gpu_at_hand_multiplies_float32_as_torch_is_set_to(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert device_at_hand(torch.device("cuda:0")).peak("float32") == pytest.approx(494.7e12)
        torch.set_float32_matmul_precision("highest")
        assert device_at_hand(torch.device("cuda:0")).peak("float32") == pytest.approx(66.9e12)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_device_that_torch_knows_and_the_planner_does_not():
    with pytest.raises(PlanError) as error:
        device_at_hand(torch.device("meta"))
    assert str(error.value) == f"device: the planner has no figures for 'meta'\n    legal: {LEGAL}"
