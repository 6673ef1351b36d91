"""A HuggingFace sequence classifier as reward, cut over ranks: its scores are those of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.config.data import DataFile
from rlhpc.core.errors import UserError
from rlhpc.data.prompts import PromptFiles, PromptSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.plan.checks.rewards import check_reward_model
from rlhpc.rollout.requests import blank_draft, with_tool_tokens
from rlhpc.trainer.reward_model import RewardModel
from rlhpc.trainer.reward_reader import RewardReader
from tests.helpers.distributed import run_ranks
from tests.helpers.learning import make_config, make_run, make_samples
from tests.helpers.responses import encode_response
from tests.helpers.tiny_models import make_model
from tests.rollout.tool_task import make_tokenizer

pytestmark = pytest.mark.ranks

# A reward model's own words: other numbers, other marks of turns, and padding after the last one.
PADDING, STOP = "<|pad|>", "=+="
TEMPLATE = (
    "{% for message in messages %}{{ '[' + message.role[0] + ']' + message.content + '=+=' }}{% endfor %}"
    "{{ '<|pad|>' }}"
)
SYSTEM = "1+1"
BROKEN = 9  # a token of which the model makes no number
# (prompt, the policy's turns and the tools' answers between them)
CONVERSATIONS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    ("12+30=", ("42",)),
    ("1+1=", ("2" * 40,)),
    (
        [
            {"role": "user", "content": "3+4="},
            {"role": "assistant", "content": "8"},
            {"role": "user", "content": "+1="},
        ],
        ("9",),
    ),
    ("5+6=", ("1+2", ["3"], "4", ["50", "6"], "11")),
    ("7+8=", ("1", ["2"], "1" * 20)),
    ("9+9=", ("",)),
    ("9+8=", ("17=+=0",)),  # a text that is the end of a turn in the reward model's words
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A policy, a reward model, and another one with its own tokenizer, as transformers saves them."""
    policy = make_model(tmp_path_factory.mktemp("policy"), "qwen2")
    make_tokenizer().save_pretrained(policy)
    rows = [
        {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": "0"}}
        for prompt, _ in ((PADDING, ()), *CONVERSATIONS)  # the first is filtered out
    ]
    (policy / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward, foreign = (_classifier(policy, tmp_path_factory.mktemp(name)) for name in ("reward", "foreign"))
    _own_tokenizer().save_pretrained(foreign)
    return policy, reward, foreign


def _classifier(policy: Path, folder: Path) -> Path:
    import transformers

    config = transformers.AutoConfig.from_pretrained(policy)
    config.num_labels = 1
    torch.manual_seed(5)
    model = transformers.Qwen2ForSequenceClassification(config).float()
    model.score.weight.data.normal_()
    model.save_pretrained(folder)
    return folder


def _own_tokenizer() -> Any:
    from transformers import Qwen2Tokenizer

    words = [PADDING, STOP, "<|none|>", *"[]suta=+9876543210"]
    return Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)},
        merges=[],
        unk_token="<|none|>",
        pad_token=PADDING,
        eos_token=STOP,
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def found(folders: tuple[Path, Path, Path]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, str, dict[str, Any]]]:
    return run_ranks(_scores, 2, *folders)


def test_scores_are_those_of_transformers(folders: tuple[Path, Path, Path], found) -> None:
    """Weighted, added to what functions gave, under a layout that is not the actor's; equal on every rank."""
    expected = _by_transformers(folders[1], [sample.tokens for sample in make_samples(0)])
    assert expected.std() > 0.1
    for rewards, parts, *_ in found:
        given = np.array([sample.reward for sample in make_samples(0)])
        assert np.abs(parts - expected).max() < 1e-4
        assert np.abs(rewards - (given + 0.5 * expected)).max() < 1e-4


def test_a_model_with_other_words_reads_the_conversation_in_them(folders: tuple[Path, Path, Path], found) -> None:
    """As transformers does with its tokenizer and template: scored before the padding, turns of tools as messages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders[2])
    texts = []
    for prompt, turns in CONVERSATIONS:
        messages = [{"role": "system", "content": SYSTEM}]
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for turn in turns:
            turn = turn.replace(STOP, "= +=") if isinstance(turn, str) else turn
            messages += [{"role": "assistant", "content": turn}] if isinstance(turn, str) else _answers(turn)
        texts.append(np.array(tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]))
    assert all(text[-1] == tokenizer.pad_token_id and text[-2] == tokenizer.eos_token_id for text in texts)
    expected = _by_transformers(folders[2], texts)
    assert expected.std() > 0.1
    for _, _, parts, refused, _ in found:
        assert np.abs(parts - expected).max() < 1e-4
        assert refused == "rewards.0.max_tokens: a conversation has 59 tokens for the reward model, which reads 40"


def test_a_number_that_is_not_finite_is_a_reward_that_failed(found) -> None:
    """Reported with its sample; ends the run, counts as 0 or is dropped; every other sample keeps its number."""
    given = make_samples(0)
    wrong = [BROKEN in sample.tokens.tolist() for sample in given]
    assert 0 < sum(wrong) < len(given) / 2
    for _, parts, _, _, broken in found:
        first = given[wrong.index(True)]
        text = make_tokenizer().decode(first.tokens[first.prompt_len :].tolist(), skip_special_tokens=True)
        assert broken["error"].startswith(
            f"returned nan for prompt {first.prompt_id + 1} of 'sums', response {text[:5]!r}"[:-1]
        )
        assert [value is None for value in broken["drop"]] == wrong
        for zero, dropped, bad, part, sample in zip(broken["zero"], broken["drop"], wrong, parts, given, strict=True):
            expected = pytest.approx((sample.reward + (0 if bad else 0.5 * part), 0 if bad else part))
            assert zero == expected
            assert dropped == (None if bad else expected)
        assert broken["counts"] == [{"result": sum(wrong)}] * 2


def _answers(turn: list[str]) -> list[dict[str, str]]:
    return [{"role": "tool", "content": answer} for answer in turn]


def test_a_model_without_a_head_is_refused(folders: tuple[Path, Path, Path]) -> None:
    policy = folders[0]
    config = make_config(policy, {"rewards": [{"model": str(policy)}]}, {})
    with pytest.raises(UserError, match=r"no tensor .score\.weight"):
        check_reward_model(config, world_size=1)


def test_what_it_cannot_read_and_a_misfitting_layout_are_refused(folders: tuple[Path, Path, Path]) -> None:
    policy, reward, foreign = folders

    def refusal(path: Path, tokens: int = 512, **section: Any) -> tuple[str, str]:
        sections = {
            "rewards": [{"model": str(path), **section}],
            "data": {"max_prompt_tokens": 12, "chat_template": False},
            "rollout": {"max_response_tokens": tokens - 12},
        }
        with pytest.raises(UserError) as caught:
            check_reward_model(make_config(policy, sections, {}), world_size=3)
        return str(caught.value.where), caught.value.message

    assert refusal(reward) == (
        str(reward),
        "the reward model: no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json",
    )
    assert "vocabularies of" in refusal(foreign, own_tokenizer=False)[1]
    same = {"own_tokenizer": None, "parallel": {"tp": 3}}
    (reward / "tokenizer.json").write_bytes((policy / "tokenizer.json").read_bytes())
    where, message = refusal(reward, **same)
    assert where.startswith("rewards.0.parallel")
    assert message.startswith("the reward model: ")
    assert refusal(reward, 513)[0] == "rewards.0.max_tokens"
    assert refusal(reward, max_tokens=513) == ("rewards.0.max_tokens", "the model has 512 positions")
    assert refusal(reward, own_tokenizer=True)[0] == "rewards.0.chat_template"
    assert refusal(foreign, 5000, **same)[0].startswith("rewards.0.parallel"), "its own lengths are not known yet"


def _scores(
    policy: Path, reward: Path, foreign: Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str, dict[str, Any]]:
    """Rewards and parts by the same tokens, parts by other words, what is said of too long a conversation, and what
    comes of numbers that are not finite."""
    section = {"model": str(reward), "weight": 0.5, "parallel": {"pp": 2}, "tokens_per_microbatch": 80}
    config = make_config(policy, {"rewards": [{**section, "own_tokenizer": False}]}, {"tp": 2})
    role = make_run(config).models.reward
    values = role.model.values
    sizes: list[int] = []
    role.model.values = lambda batches: sizes.extend(len(b.tokens) for b in batches) or values(batches)
    tokenizer, prompts = _prompts(policy, config)
    read = RewardReader.of(config, None)  # without the policy's tokenizer, by which control tokens become texts
    scored, _ = RewardModel(role, read, tokenizer).score(make_samples(0), None)
    assert 64 < max(sizes) <= 80, "its own bound, not the actor's"
    broken = _broken(role, config, tokenizer, prompts)
    data = {"system_prompt": SYSTEM}
    section = {"model": str(foreign), "tokens_per_microbatch": 80, "parallel": {}}
    config = make_config(policy, {"rewards": [section], "data": data}, {"tp": 2})
    tokenizer, prompts = _prompts(policy, config)
    samples, reader = _conversations(tokenizer, prompts), RewardReader.of(config, tokenizer)
    foreign_model = RewardModel(make_run(config).models.reward, reader, tokenizer)
    own, _ = foreign_model.score(samples, prompts)
    (alone,), _ = foreign_model.score(samples[:1], prompts)
    assert alone.reward == pytest.approx(own[0].reward), "fewer samples than data-parallel ranks"
    refused = ""
    short = make_config(policy, {"rewards": [{**section, "max_tokens": 40}], "data": data}, {"tp": 2})
    try:
        RewardReader.of(short, tokenizer).read(samples, prompts)
    except UserError as error:
        refused = f"{error.where}: {error.message}"
    cut = short.model_copy(update={"rewards": [short.reward_model.model_copy(update={"too_long": "truncate"})]})
    whole = reader.read(samples, prompts)
    assert foreign_model.lengths == [len(whole[0])], "for FLOPs, without the sample that fills the other rank"
    for one, other in zip(RewardReader.of(cut, tokenizer).read(samples, prompts), whole, strict=True):
        assert one.tolist() == other[-40:].tolist()
    parts = ([sample.reward_parts["model"] for sample in found] for found in (scored, own))
    return (np.array([s.reward for s in scored]), *map(np.array, parts), refused, broken)


def _broken(role: Any, config: Any, tokenizer: Any, prompts: Any) -> dict[str, Any]:
    """The result of non-finite scores by reward_workers.on_failure: the refusal, or reward and part of each."""
    parameters = [item for chunk in role.model._chunks for item in chunk.named_parameters()]
    with torch.no_grad():
        for name, parameter in parameters:
            if name.endswith("word_embeddings.weight"):
                parameter[BROKEN] = float("nan")
    samples = [replace(sample, prompt_id=sample.prompt_id + 1) for sample in make_samples(0)]  # 0 is filtered out
    found: dict[str, Any] = {"counts": []}
    for policy in ("error", "zero", "drop"):
        section = config.reward_workers.model_copy(update={"on_failure": policy})
        reader = RewardReader.of(config.model_copy(update={"reward_workers": section}), None)
        try:
            scored, failures = RewardModel(role, reader, tokenizer).score(samples, prompts)
            found["counts"].append(failures)
            found[policy] = [s and (s.reward, s.reward_parts["model"]) for s in scored]
        except UserError as error:
            found[policy] = error.message
    return found


def _prompts(policy: Path, config: Any) -> tuple[Any, Any]:
    tokenizer = Tokenizer.load(policy, 64, config.data)
    section = config.data.model_copy(update={"filter": "tests.trainer.test_reward_model:is_sum"})
    files = [DataFile(path=policy / "train.jsonl")]
    return tokenizer, PromptSet.load(PromptFiles(files, "data.train", filtered=True), section, tokenizer, texts=True)


def is_sum(row: dict[str, Any]) -> bool:
    return row["prompt"] != PADDING


def _conversations(tokenizer: Any, prompts: Any) -> list[Any]:
    """Samples as an engine would draw them, the end of the last turn included."""
    samples = []
    for place, (_, turns) in enumerate(CONVERSATIONS):
        draft = blank_draft(prompts.prompts[place], 0, place)
        for turn in turns:
            if isinstance(turn, str):
                drawn = encode_response(tokenizer, turn)
                response_mask = (
                    None if draft.response_mask is None else np.append(draft.response_mask, np.ones(len(drawn), bool))
                )
                tokens = np.append(draft.tokens, np.array(drawn, dtype=np.int32))
                zeros = np.zeros(len(tokens) - draft.prompt_len, dtype=np.float32)
                draft = replace(draft, tokens=tokens, log_probs=zeros, response_mask=response_mask)
            else:
                # Without the end of the policy's turn, which it sampled itself.
                draft = with_tool_tokens(draft, tokenizer.tool_turn(turn)[1:])
        samples.append(draft)
    return samples


def _by_transformers(folder: Path, texts: list[np.ndarray]) -> np.ndarray:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        inputs = [torch.from_numpy(tokens.astype(np.int64))[None] for tokens in texts]
        return np.array([float(model(tokens).logits[0, 0]) for tokens in inputs])
