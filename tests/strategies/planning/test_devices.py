"""Devices by name and by numbers."""

from __future__ import annotations

import re

import pytest

from lockstep.callbacks.monitors.throughput_monitor import PEAK_TFLOPS
from lockstep.strategies.planning.devices import find_device, known_devices

pytestmark = pytest.mark.unit


def test_every_device_has_figures_and_a_source() -> None:
    devices = known_devices()
    wanted = {"a100-40", "a100-80", "b200", "h100-80", "h100-pcie", "h200", "l4", "l40s", "mi300x", "rtx-4090"}
    assert wanted | {"v100-16", "v100-32"} == set(devices)
    for device in devices.values():
        assert "data sheet" in device.source or "white paper" in device.source
        assert device.memory >= 16 * 2**30 and device.node > 1
        assert min(device.bandwidth, device.link) > 1e10 and (device.network is None or device.network > 1e9)
        assert device.peak("float16") >= device.peak("float32", tf32=True) >= device.peak("float32")


def test_peaks_are_those_that_throughput_is_measured_against() -> None:
    for name, words in (("a100-80", "A100"), ("h100-80", "H100"), ("h200", "H200"), ("l4", "L4"), ("l40s", "L40S")):
        half, tf32, single = PEAK_TFLOPS[words]
        device = known_devices()[name]
        assert device.peak("bfloat16") == pytest.approx(half * 1e12, rel=1e-3)
        assert device.peak("float32", tf32=True) == pytest.approx(tf32 * 1e12, rel=1e-3)
        assert device.peak("float32") == pytest.approx(single * 1e12, rel=1e-2)


def test_names_numbers_and_both() -> None:
    assert find_device("H100-80GB") == find_device("h100-80") == find_device("NVIDIA h100 80")
    assert find_device("RTX4090").name == "rtx-4090"
    changed = find_device("h100-80,network=25e9,node=4")
    assert (changed.network, changed.node) == (25e9, 4) and changed.flops == find_device("h100-80").flops
    own = find_device("memory=80,flops=989e12,bandwidth=3e12")
    assert own.memory == 80 * 2**30 and own.peak("bfloat16") == own.peak("float64") == 989e12 and own.network is None
    assert find_device("memory=8589934592").memory == 8 * 2**30
    v100 = known_devices()["v100-16"]
    assert v100.peak("bfloat16") == v100.peak("float32")  # its tensor cores take float16 alone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "did you mean h100-80 or h100-pcie?"),
        ("a100-60", "did you mean a100-"),
        ("tpu", "--gpu must be one of a100-40, .* or numbers such as memory=80,flops=989e12, got 'tpu'"),
        ("flops=1e12", "needs its memory"),
        ("memory=eighty", "memory of a device must be a positive number, but --gpu memory=eighty gives 'eighty'"),
        ("memory=80,flop=1", "gives 'flop'; did you mean 'flops'?"),
        ("h100-80,a100-80", "a device is one name"),
        ("h100-80,node=2.5", "node of a device must be a positive number"),
        ("", "a device is one name"),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        find_device(text)
    assert re.search(r"\n|\. ", str(caught.value)) is None
