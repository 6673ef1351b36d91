"""The site file: where it is found, what it adds to a configuration, and its mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.config.load import dump_config, load_config, load_with_site
from rlhpc.config.schema import RunConfig
from rlhpc.config.site_file import json_schema
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.plan.estimates.hardware import read_site

ROOT = Path(__file__).parents[2]
RUN = "name: tiny\nmodel: {path: a/model}\ntrain: {steps: 3}\n"
SITE = """slurm:
  account: physics
  partition: gpu
  modules: [cuda]
  environment: {A: site, B: site}
efficiency: {compute: 0.4, memory: 0.5}
gpus:
  ours: {like: h100, per_node: 4}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of configuration files, and no other place for a site file."""
    monkeypatch.delenv(env.RLHPC_SITE, raising=False)
    monkeypatch.setenv(env.XDG_CONFIG_HOME, str(tmp_path / "home"))
    (tmp_path / "home" / "rlhpc").mkdir(parents=True)
    return tmp_path / "home"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def account(path: Path, name: str) -> Path:
    return write(path, f"slurm: {{account: {name}}}\n")


def test_the_key_wins_over_the_variable_and_the_variable_over_the_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run.yaml", RUN)
    assert load_config(run).slurm.account is None
    account(home / "rlhpc" / "site.yaml", "home")
    assert load_config(run).slurm.account == "home"
    monkeypatch.setenv(env.RLHPC_SITE, str(account(tmp_path / "variable.yaml", "variable")))
    assert load_config(run).slurm.account == "variable"
    key = account(tmp_path / "key.yaml", "key")
    assert load_config(run, [f"site={key}"]).slurm.account == "key"
    assert load_config(write(tmp_path / "named.yaml", f"{RUN}site: {key}\n")).slurm.account == "key"
    assert load_config(run, ["site=null"]).slurm.account is None
    monkeypatch.setenv(env.RLHPC_SITE, "")
    assert load_config(run).slurm.account is None


def test_without_xdg_config_home_it_is_in_dot_config(home: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(env.XDG_CONFIG_HOME)
    monkeypatch.setenv(env.HOME, str(tmp_path))
    (tmp_path / ".config" / "rlhpc").mkdir(parents=True)
    account(tmp_path / ".config" / "rlhpc" / "site.yaml", "dot")
    assert load_config(write(tmp_path / "run.yaml", RUN)).slurm.account == "dot"


def test_values_of_the_run_take_precedence_key_by_key(home: Path, tmp_path: Path) -> None:
    write(home / "rlhpc" / "site.yaml", SITE)
    own = "slurm: {partition: test, modules: [gcc], environment: {B: run}}\nsite: {efficiency: {memory: 0.6}}\n"
    loaded = load_with_site(write(tmp_path / "run.yaml", RUN + own), ["slurm.account=chemistry"])
    slurm, site = loaded.config.slurm, read_site(loaded.config)
    assert (slurm.account, slurm.partition, slurm.modules) == ("chemistry", "test", ["gcc"])
    assert slurm.environment == {"A": "site", "B": "run"}
    assert (site.efficiency.compute, site.efficiency.memory, site.gpus["ours"].per_node) == (0.4, 0.6, 4)
    assert loaded.site is not None
    assert loaded.site.text == f"{home}/rlhpc/site.yaml: slurm.environment.A, site.efficiency, site.gpus"


def test_a_written_configuration_depends_on_no_site_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = write(tmp_path / "site.yaml", SITE)
    loaded = load_config(write(tmp_path / "run.yaml", RUN), [f"site={site}"])
    written = write(tmp_path / "written.yaml", dump_config(loaded))
    account(site, "another")
    monkeypatch.setenv(env.RLHPC_SITE, str(site))
    assert load_config(written) == loaded
    site.unlink()
    assert load_config(written).slurm.account == "physics"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slurm:\n  acount: x\n", "{file}:2: slurm.acount: unknown key; did you mean 'account' or"),
        ("slurm: {nodes: 2}\n", "{file}:1: slurm.nodes: unknown key; "),
        (
            "slurm: {container: {runtme: x}}\n",
            "{file}:1: slurm.container.runtme: unknown key; did you mean 'runtime' or",
        ),
        ("efficiency: {forward_compute: 0.3}\n", "{file}:1: efficiency.forward_compute: no longer a key: `rlhpc plan"),
        ("efficiency: {phases: {updat: 2}}\n", "{file}:1: efficiency.phases.updat: unknown key; did you mean 'update'"),
        ("gpu: {}\n", "{file}:1: gpu: unknown key; did you mean 'gpus'?"),
        ("gpus: {h200: {memory_gb: 3}}\n", "{file}:1: gpus.h200.memory_gb: unknown key; did you mean 'memory_gib'"),
        ("gpus: {h200: {tflops: -1}}\n", "{file}:1: gpus.h200.tflops: -1 is not allowed"),
        (
            "gpus:\n  h200:\n    driver: 570.86\n",
            "{file}:3: gpus.h200.driver: 570.86 is not allowed (Input should be a",
        ),
        ('gpus: {h200: {driver: "R570"}}\n', "{file}:1: gpus.h200.driver: 'R570' is not allowed"),
        ("efficiency: {compute: 2}\n", "{file}:1: efficiency.compute: 2 is not allowed"),
        ("efficiency: {gemm: 1}\n", "{file}:1: efficiency.gemm: unknown key"),
        ("slurm: {memory: lots}\n", "{file}:1: slurm.memory: 'lots' is not allowed"),
        ("[1]\n", "{file}: site file has no keys; see `rlhpc configs site`"),
        ("gpus: {\n", "{file}:2: "),
    ],
)
def test_a_mistake_in_it_is_one_line_with_its_place(home: Path, tmp_path: Path, text: str, message: str) -> None:
    file = write(home / "rlhpc" / "site.yaml", text)
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path / "run.yaml", RUN))
    assert str(caught.value).startswith(message.format(file=file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given_by", ["site", env.RLHPC_SITE])
def test_a_named_file_must_exist(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_by: str) -> None:
    absent, overrides = tmp_path / "none.yaml", []
    if given_by == "site":
        overrides = [f"site={absent}"]
    else:
        monkeypatch.setenv(given_by, str(absent))
    with pytest.raises(UserError, match=rf"none\.yaml: site file cannot be read \(.*\); correct {given_by}$"):
        load_config(write(tmp_path / "run.yaml", RUN), overrides)


def test_a_value_that_fits_the_site_but_not_the_run_names_the_site_file(home: Path, tmp_path: Path) -> None:
    file = write(home / "rlhpc" / "site.yaml", "slurm:\n  container: {image: a.sif}\n")
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path / "run.yaml", RUN))
    assert str(caught.value).startswith(f"{file}:2: slurm.container.runtime: is missing")


def test_a_container_runtime_alone_makes_no_container(home: Path, tmp_path: Path) -> None:
    write(home / "rlhpc" / "site.yaml", "slurm: {container: {runtime: pyxis, mounts: [/data]}}\n")
    run = write(tmp_path / "run.yaml", RUN)
    assert load_config(run).slurm.container is None
    container = load_config(run, ["slurm.container.image=a.sqsh"]).slurm.container
    assert container is not None
    assert (container.runtime, container.image, container.mounts) == ("pyxis", "a.sqsh", ["/data"])


def test_the_shipped_example_is_read_and_each_of_its_comments_is_a_key(home: Path, tmp_path: Path) -> None:
    example, run = ROOT / "configs" / "site.yaml", write(tmp_path / "run.yaml", RUN)
    assert load_config(run, [f"site={example}"]) == RunConfig.model_validate(
        {**load_config(run).model_dump(), "site": load_config(run).site}
    ), "it changes nothing until lines are uncommented"
    lines = example.read_text().splitlines()
    keys = write(tmp_path / "site.yaml", "\n".join(line.removeprefix("# ") for line in lines[5:]))
    loaded = load_with_site(run, [f"site={keys}"])
    assert loaded.site is not None
    assert len(loaded.site.keys) > 20
    assert read_site(loaded.config).gpus["ours"].per_node == 4


def test_the_example_in_the_pages_is_read(home: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    (text,) = (block for block in page.split("```\n") if block.startswith("gpus:"))
    write(home / "rlhpc" / "site.yaml", text)
    site = read_site(load_config(write(tmp_path / "run.yaml", RUN)))
    assert (site.gpus["h200"].network_gbps, site.gpus["ours"].per_node, site.efficiency.compute) == (6.25, 4, 0.48)


def test_its_committed_schema_is_current() -> None:
    committed = json.loads((ROOT / "configs" / "site_schema.json").read_text(encoding="utf-8"))
    assert committed == json.loads(json_schema()), "run `rlhpc schema --site > configs/site_schema.json`"
    assert set(committed["properties"]) == {"gpus", "efficiency", "disk", "slurm"}


def test_a_folder_in_the_place_of_the_site_file_is_named_with_its_key(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"site file cannot be read \(Is a directory\); correct site$"):
        load_config(write(tmp_path / "run.yaml", RUN), [f"site={tmp_path}"])
