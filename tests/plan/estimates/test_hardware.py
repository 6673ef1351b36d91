"""The table of GPUs, and the site's file over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.plan.estimates.hardware import GPUS, Reserves, named_gpu, peak_tflops, read_site, site_entry


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "x", "model": {"path": "m"}, "train": {"steps": 1}, **sections})


def site_file(folder: Path, text: str) -> dict[str, Any]:
    (folder / "gpus.yaml").write_text(text)
    return {"gpus_file": folder / "gpus.yaml"}


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
    both = config(planning={"gpu": "H20"}, slurm={"gpu_type": "h100"})
    site = read_site(both)
    assert named_gpu(both, site, "b200") is site.gpus["b200"]
    assert named_gpu(both, site) is GPUS["h20"]
    assert named_gpu(config(slurm={"gpu_type": "a100"}), site) is GPUS["a100-80"]
    assert named_gpu(config(slurm={"gpu_type": "rtx"}), site) is None
    with pytest.raises(UserError, match=r"planning\.gpu: no GPU 'h2000' is known; did you mean 'h200'"):
        named_gpu(config(planning={"gpu": "h2000"}), site)


def test_a_sites_file_adds_and_changes(tmp_path: Path) -> None:
    text = """
gpus:
  h200: {network_gbps: 25, cpu_memory_gib: 2000}
  ours: {like: h100, per_node: 4, linked: 4}
  cpu: {tflops: 0.1, memory_gib: 8, memory_gbps: 20, node_gbps: 5, network_gbps: 1, cpu_link_gbps: 5,
        cpu_memory_gbps: 10, per_node: 2}
  a100: {network_gbps: 12}
efficiency: {compute: 0.4, memory: 0.5}
"""
    site = read_site(config(planning={**site_file(tmp_path, text), "efficiency": {"memory": 0.6}}))
    assert (site.gpus["h200"].network_gbps, site.gpus["h200"].memory_gbps, site.gpus["h200"].cpu_memory_gib) == (
        25,
        4800,
        2000,
    )
    assert (site.gpus["ours"].per_node, site.gpus["ours"].tflops) == (4, 989.5)
    assert site.gpus["cpu"].linked == 2
    assert site.gpu("a100", "").network_gbps == site.gpus["a100-80"].network_gbps == 12, "another name of the same"
    assert (site.efficiency.compute, site.efficiency.memory) == (0.4, 0.6)  # the configuration's own word wins
    assert GPUS["h200"].network_gbps == 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: {h200: {memory_gb: 3}}", "gpus.h200.memory_gb: unknown key; did you mean 'memory_gib'"),
        ("gpu: {}", "gpu: unknown key; did you mean 'gpus'"),
        ("gpus: {ours: {tflops: 3}}", "gpus.ours.memory_gib: is missing; add it, or like:"),
        ("gpus: {ours: {like: h10}}", "gpus.ours.like: no GPU 'h10'; did you mean 'h100'"),
        ("gpus: {h200: {tflops: -1}}", "gpus.h200.tflops: -1 is not allowed"),
        ("gpus: {h200: {driver: 570.86}}", "gpus.h200.driver: 570.86 is not allowed (Input should be a valid string)"),
        ('gpus: {h200: {driver: "R570"}}', "gpus.h200.driver: 'R570' is not allowed"),
        ("efficiency: {compute: 2}", "efficiency.compute: 2 is not allowed"),
        ("efficiency: {gemm: 1}", "efficiency.gemm: unknown key"),
        ("[1]", "is not allowed"),
        ("gpus: {", "gpus.yaml:1"),
    ],
)
def test_what_is_wrong_in_it_is_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_site(config(planning=site_file(tmp_path, text)))
    assert message in str(caught.value)
    assert "gpus.yaml" in str(caught.value)


def test_an_absent_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_site(config(planning={"gpus_file": tmp_path / "none.yaml"}))


def test_the_pages_example_of_a_sites_file_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    (text,) = (block for block in page.split("```\n") if block.startswith("gpus:"))
    site = read_site(config(planning=site_file(tmp_path, text)))
    assert (site.gpus["h200"].network_gbps, site.gpus["ours"].per_node, site.efficiency.compute) == (6.25, 4, 0.48)


def test_what_an_acceptance_has_measured_becomes_lines_of_the_file(tmp_path: Path) -> None:
    figures = {"8b: libraries": 2.314, "8b: engine asleep": 0.9, "1.5b: engine asleep": 1.62, "8b: seconds": 0.04}
    text = site_entry("H100", figures, "580.65.06")
    assert text == ('gpus:\n  h100:\n    context_gib: 2.31\n    sleeping_engine_gib: 1.62\n    driver: "580.65.06"\n')
    gpu = read_site(config(planning=site_file(tmp_path, text))).gpus["h100"]
    assert (gpu.tflops, gpu.driver) == (GPUS["h100"].tflops, "580.65.06")
    assert gpu.reserves == Reserves(int(2.31 * 2**30), int(1.62 * 2**30))
    assert GPUS["h100"].reserves == Reserves()
    assert site_entry("h100", {"8b: seconds": 0.04}, "580") == ""
