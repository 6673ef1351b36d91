"""The tables of architectures in the docs are those of the stored results."""

from __future__ import annotations

import json

from tools.architectures_table import PAGE, RESULTS, shortened, table
from tools.markers import between


def test_the_page_has_the_stored_results() -> None:
    assert between(PAGE, "architectures") == table(json.loads(RESULTS.read_text()))


def test_what_must_work_works_and_what_must_fail_fails() -> None:
    rows = json.loads(RESULTS.read_text())["architectures"]
    by_hand = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4", "granite")
    by_hand += ("starcoder2", "smollm3", "gpt_oss", "qwen3_moe", "deepseek_v3")
    assert [kind for kind in by_hand if not rows[kind]["works"]] == []
    assert [kind for kind in ("qwen3_next", "bamba", "llama4", "llama4_text") if rows[kind]["works"]] == []
    assert sum(row["works"] for row in rows.values()) >= 30
    assert all(bool(row["reason"]) != row["works"] for row in rows.values())


def test_vllm_serves_natively_or_by_its_transformers_back_end() -> None:
    rows = json.loads(RESULTS.read_text())["architectures"]
    assert {rows[kind]["vllm"] for kind in ("llama", "gemma2", "gpt_oss")} == {"yes"}
    assert {rows[kind]["vllm"] for kind in ("olmo2", "starcoder2", "smollm3")} == {"Transformers back end"}
    assert rows["gpt_neo"]["vllm"] == "no"


def test_a_reason_is_a_cell() -> None:
    row = {"class": "C", "vllm": "no", "works": False, "reason": "a|b <x>"}
    text = table({"versions": {"torch": "2"}, "architectures": {"c": row}})
    assert text.endswith("| a\\|b &lt;x> | c |\n")


def test_reasons_that_differ_in_figures_or_names_are_one() -> None:
    rows = json.loads(RESULTS.read_text())["architectures"]
    assert len({shortened(row["reason"]) for row in rows.values() if not row["works"]}) == 11
    assert shortened("packed documents influence each other (2 of 2 layers do not): logits differ by 0.18") == (
        "packed documents influence each other"
    )
    assert shortened("the architecture has layers of conv, which packed attention does not compute") == (
        "it has layers that packed attention does not compute"
    )
