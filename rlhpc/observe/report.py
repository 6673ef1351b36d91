"""Report of a finished run: plots, and a text with its final metrics and last samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.core.attempts import export_folder, exported_steps
from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record, is_step, number
from rlhpc.core.text import printable
from rlhpc.observe.evaluation import BY_SET, BY_SOURCE, OVERALL
from rlhpc.observe.metrics import read_records

WIDTH = 110
REWARD, VALIDATION, LOSS = "reward/mean", "validation/reward_mean", "loss"
REWARD_PLOT, LOSS_PLOT = "reward.png", "sft_loss.png"


def write_report(folder: RunFolder) -> None:
    """Writes report/report.txt and a plot of each phase from metrics.jsonl and samples.jsonl."""
    records = [record for record in read_records(folder.metrics) if is_step(record)]
    samples = [sample for sample in read_records(folder.samples) if is_step({**sample, "phase": "rl"})]
    folder.report.mkdir(parents=True, exist_ok=True)
    write_atomic(folder.report_text, _text(folder, records, samples))
    plot_phases(folder.report, records)


def plot_phases(folder: Path, records: Sequence[Record]) -> None:
    """Plots the reward of the RL phase and the loss of the warm-up, of those that the records have."""
    phases = {record["phase"] for record in records}
    if "rl" in phases:
        _plot_rewards(folder / REWARD_PLOT, records)
    if "sft" in phases:
        _plot_supervised_loss(folder / LOSS_PLOT, records)


def write_evaluation(folder: RunFolder, metrics: Mapping[str, float]) -> None:
    """Writes report/report.txt with the metrics of an evaluation, one column per set of prompts."""
    folder.report.mkdir(parents=True, exist_ok=True)
    write_atomic(folder.report_text, _printed([_evaluation(metrics)], folder.samples))


def _text(folder: RunFolder, records: Sequence[Record], samples: Sequence[Record]) -> str:
    tables = (_final_metrics(records), _validations(records), _cost(records), _last_samples(samples))
    exported = [f"Exported model: {export_folder(folder, step)}" for step in exported_steps(folder)[-1:]]
    return "\n".join([_printed(tables, folder.report, "Plots").rstrip("\n"), *exported]) + "\n"


def _printed(tables: Iterable[Any], file: Path, what: str = "Samples") -> str:
    """Tables that have rows, and the path of further details."""
    from rlhpc.core.terminal import Terminal

    console = Terminal(width=WIDTH, record=True, file=_Nowhere(), color_system=None)
    for table in tables:
        if table.row_count:
            console.print(table)
    console.print(f"{what}: {file}", soft_wrap=True)
    return console.export_text()


def _evaluation(metrics: Mapping[str, float]) -> Any:
    """One row per metric, one column for all prompts and for each group of them."""
    groups: dict[str, dict[str, float]] = {}
    for path, value in metrics.items():
        group, _, name = path.rpartition("/")
        groups.setdefault(group, {})[name] = value
    titles = {group: group.removeprefix(BY_SET).removeprefix(BY_SOURCE) or "all" for group in groups}
    table = _table("Evaluation on held-out prompts", "metric", *titles.values())
    for name in groups[OVERALL]:
        table.add_row(name, *(_number(found.get(name)) for found in groups.values()))
    return table


class _Nowhere:
    """Discards text: the console records it."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


def _final_metrics(records: Sequence[Record]) -> Any:
    """One row per metric: its last value in each phase."""
    phases = [phase for phase in ("sft", "rl") if any(r["phase"] == phase for r in records)]
    last: dict[str, dict[str, Any]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("phase", "step", "total_steps", "time"):
                last.setdefault(name, {})[record["phase"]] = value
    steps = {r["phase"]: f"{r['phase']} step {r['step']}/{r.get('total_steps', '?')}" for r in records}
    table = _table("Final metrics", "metric", *(steps[phase] for phase in phases))
    for name in sorted(last):
        table.add_row(name, *(_number(last[name].get(phase)) for phase in phases))
    return table


def _validations(records: Sequence[Record]) -> Any:
    table = _table("Validation on held-out prompts", "rl step", "mean reward", "training reward")
    for record in records:
        if VALIDATION in record:
            table.add_row(str(record["step"]), _number(record[VALIDATION]), _number(record.get(REWARD)))
    return table


def _cost(records: Sequence[Record]) -> Any:
    """GPU-hours of all attempts, the idle share of them, and what they trained on."""
    last: Mapping[str, Any] = next((record for record in reversed(records) if "cost/gpu_hours" in record), {})
    hours, idle, tokens = (number(last.get(f"cost/{name}")) for name in ("gpu_hours", "idle_gpu_hours", "tokens"))
    table = _table("Cost of the run", "GPU-hours", "idle in phases", "tokens", "tokens per GPU-hour")
    if hours and idle is not None and tokens is not None:
        table.add_row(_number(hours), f"{idle / hours:.1%}", _number(tokens), _number(tokens / hours))
    return table


def _last_samples(samples: Sequence[Record]) -> Any:
    """The samples of the last validation."""
    step = max((sample["step"] for sample in samples), default=0)
    table = _table(f"Held-out samples after rl step {step}", "prompt", "response", "expected", "reward")
    for sample in samples:
        if sample["step"] == step:
            row = (str(sample.get(name, "")) for name in ("prompt", "response", "expected"))
            table.add_row(*map(_shortened, row), _number(sample.get("reward")))
    return table


def _table(title: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="", box=box.ASCII2)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _shortened(text: str, limit: int = 400) -> Any:
    """Text without console markup; of a long one the beginning and the end."""
    from rich.text import Text

    text = printable(text)
    return Text(text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}")


def _number(value: object) -> Any:
    """Number with four digits; other values as text."""
    known = number(value)
    if known is None:
        return "" if value is None else _shortened(str(value), 40)
    return f"{known:,.0f}" if abs(known) >= 1e4 else f"{known:,.4g}"


def _plot_rewards(path: Path, records: Sequence[Record]) -> None:
    """Plots training and validation reward over the RL steps: supervised ones have neither."""
    figure, axes = _figure()
    axes.plot(*_curve(records, REWARD), color="tab:blue", linewidth=1.2, label="training reward (mean)")
    held_out = "validation reward (held out)"
    axes.plot(*_curve(records, VALIDATION), color="tab:orange", marker="o", markersize=4, label=held_out)
    axes.set(xlabel="RL step", ylabel="reward", title="Reward of the RL phase")
    axes.set_ylim(bottom=1.05 * min([0.0, *filter(math.isfinite, _curve(records, REWARD)[1])]))
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.savefig(path)


def _plot_supervised_loss(path: Path, records: Sequence[Record]) -> None:
    """Plots the loss over the steps of the supervised warm-up."""
    figure, axes = _figure()
    steps = [record for record in records if record["phase"] == "sft"]
    axes.plot(*_curve(steps, LOSS), color="tab:blue", linewidth=1.2)
    axes.set(xlabel="supervised step", ylabel="loss in nats", title="Loss of the supervised warm-up")
    axes.set_ylim(bottom=0)
    figure.savefig(path)


def _figure() -> tuple[Any, Any]:
    """Figure with one pair of axes, without pyplot, which keeps state and looks for a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def _curve(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have a number for the metric."""
    values = [(record["step"], number(record.get(name))) for record in records]
    return [step for step, value in values if value is not None], [value for _, value in values if value is not None]
