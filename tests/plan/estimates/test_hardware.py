"""The table of GPUs, and the site's figures over it."""

from __future__ import annotations

import pytest

from rlhpc.config import yaml12
from rlhpc.core.errors import UserError
from rlhpc.plan.estimates.hardware import GPUS, Reserves, Site, named_gpu, peak_tflops, read_site, site_entry
from tests.helpers.configs import least_config


def site(text: str) -> Site:
    return read_site(least_config(site=yaml12.parse(text, "site")))


def test_peaks_are_known_by_the_drivers_name() -> None:
    known = {
        "NVIDIA H200": 989.5,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA H100 80GB HBM3": 989.5,
        "NVIDIA H20": 148.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA GB200": 2500.0,
        "NVIDIA B200": 2250.0,
        "AMD Instinct MI300X": 1307.4,
    }
    assert {name: peak_tflops(name) for name in known} == known
    assert peak_tflops("some other") is None


def test_a_gpu_is_named_by_option_then_plan_then_slurm() -> None:
    both = least_config(planning={"gpu": "H20"}, slurm={"gpu_type": "h100"})
    known = read_site(both)
    assert named_gpu(both, known, "b200") is known.gpus["b200"]
    assert named_gpu(both, known) is GPUS["h20"]
    assert named_gpu(least_config(slurm={"gpu_type": "a100"}), known) is GPUS["a100-80"]
    assert named_gpu(least_config(slurm={"gpu_type": "rtx"}), known) is None
    with pytest.raises(UserError, match=r"planning\.gpu: no GPU 'h2000' is known; did you mean 'h200'"):
        named_gpu(least_config(planning={"gpu": "h2000"}), known)


def test_a_site_adds_and_changes_gpus() -> None:
    gpus = site("""
gpus:
  h200: {network_gbps: 25, cpu_memory_gib: 2000}
  ours: {like: h100, per_node: 4, linked: 4}
  cpu: {tflops: 0.1, memory_gib: 8, memory_gbps: 20, node_gbps: 5, network_gbps: 1, cpu_link_gbps: 5,
        cpu_memory_gbps: 10, per_node: 2}
  a100: {network_gbps: 12}
""").gpus
    assert (gpus["h200"].network_gbps, gpus["h200"].memory_gbps, gpus["h200"].cpu_memory_gib) == (25, 4800, 2000)
    assert (gpus["ours"].per_node, gpus["ours"].tflops) == (4, 989.5)
    assert gpus["cpu"].linked == 2
    assert gpus["a100-80"].network_gbps == 12, "another name of the same"
    assert GPUS["h200"].network_gbps == 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: {ours: {tflops: 3}}", "site.gpus.ours.memory_gib: is missing; add it, or like:"),
        ("gpus: {ours: {like: h10}}", "site.gpus.ours.like: no GPU 'h10'; did you mean 'h100'"),
    ],
)
def test_an_incomplete_gpu_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        site(text)
    assert str(caught.value).startswith(message)


def test_what_an_acceptance_has_measured_becomes_lines_of_the_site_file() -> None:
    figures = {"8b: libraries": 2.314, "8b: engine asleep": 0.9, "1.5b: engine asleep": 1.62, "8b: seconds": 0.04}
    text = site_entry("H100", figures, "580.65.06")
    assert text == ('gpus:\n  h100:\n    context_gib: 2.31\n    sleeping_engine_gib: 1.62\n    driver: "580.65.06"\n')
    gpu = site(text).gpus["h100"]
    assert (gpu.tflops, gpu.driver) == (GPUS["h100"].tflops, "580.65.06")
    assert gpu.reserves == Reserves(int(2.31 * 2**30), int(1.62 * 2**30))
    assert GPUS["h100"].reserves == Reserves()
    assert site_entry("h100", {"8b: seconds": 0.04}, "580") == ""
