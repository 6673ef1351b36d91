"""Sampling options reach vLLM, and what tokens were drawn from comes back with them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.api import KeptTokens, Request, SamplingOptions
from rlhpc.core.errors import UserError
from tests.helpers.distributed import run_ranks
from tests.rollout import engines

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

LENGTH, END, FIRST = 24, 1, 5
PROMPTS = [tuple((11 * i + 17 * number) % 90 + FIRST for i in range(3 + 9 * number)) for number in range(6)]
TEXT = [chr(code) for code in range(32, 127)]  # one token each, from FIRST on
CUTS = {"top_k": 20, "min_p": 0.02}


def requests(top_p: float = 1.0, temperature: float = 0.8, **options: Any) -> list[Request]:
    own = SamplingOptions(**options)
    return [Request(prompt, 100 + i, LENGTH, temperature, top_p, own) for i, prompt in enumerate(PROMPTS)]


def add_tokenizer(folder: Path) -> None:
    """One token for each printable character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<end>": END, **{text.replace(" ", "Ġ"): FIRST + i for i, text in enumerate(TEXT)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)


def sample(path: Path) -> dict[str, Any]:
    engine = engines.ready(path, end_tokens=(END,), reads_text=True, sampling={"top_k": 20})
    found: dict[str, Any] = {}

    def run(name: str, asked: list[Request]) -> None:
        found[name] = engine.generate(asked)

    run("free", requests())
    run("cut", requests(0.9, **CUTS))
    run("greedy", requests(temperature=0.0))
    run("nucleus", requests(0.9))
    texts = [decoded(completion) for completion in found["free"]]
    pairs = (text[place : place + 2] for place in range(2, LENGTH - 2) for text in texts)
    found["stop"] = stop = next(pair for pair in pairs if len(pair) == 2 and pair.isascii())
    run("stopped", requests(stop=(stop,)))
    run("stopped, not trained", requests(stop=(stop,), train_on_stop=False))
    run("stop token", requests(stop_token_ids=(int(found["free"][0].tokens[3]),)))
    run("bad words", requests(bad_words=(stop, "~")))
    run("no stop before", requests(stop_token_ids=tuple(range(5, 100)), min_tokens=7))
    run("biased", requests(logit_bias=((77, 50.0),)))
    run("penalized", requests(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.5))
    run("regex", requests(structured_output=("regex", r"ab[0-9]{3}c")))
    run("choice", requests(structured_output=("choice", ["yes", "no"])))
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
    run("json", requests(structured_output=("json_schema", schema)))
    with pytest.raises(UserError) as refused:
        engine.generate(requests(structured_output=("regex", "[")))
    found["refused"] = str(refused.value)
    asked = requests(0.9, **CUTS)
    for key, request in enumerate(asked):
        engine.submit(key, request)
    ended = [key for _ in range(7) for key, _ in engine.step()]
    begun = engine.so_far({key: 4 for key in range(len(asked)) if key not in ended})
    found["late"] = begun
    begun = engine.abort([*begun])
    rest = [
        Request((*r.prompt, *begun[k].tokens.tolist()), r.seed, LENGTH - len(begun[k].tokens), 0.8, 0.9, r.options)
        for k, r in enumerate(asked)
        if k in begun
    ]
    found["in two parts"] = dict(zip(begun, zip(begun.values(), engine.generate(rest), strict=True), strict=True))
    left = engines.vllm_engine(engine).collective_rpc("kept_tokens_of", args=("1", len(PROMPTS[1]), 1))[0]
    found["forgotten"] = not left.counts.any()
    return found


def trained(path: Path, asked: list[Request], found: list[Any]) -> list[np.ndarray]:
    """The trainer's log-probs of the responses, over the kept tokens."""
    from rlhpc.data.collate import pack_batch, unpack, with_kept
    from tests.helpers.training import make_actor

    actor = make_actor(path)
    sequences = [
        (np.concatenate([np.asarray(request.prompt, np.int32), completion.tokens]), len(request.prompt))
        for request, completion in zip(asked, found, strict=True)
    ]
    lengths = [length for _, length in sequences]
    batch = pack_batch(sequences, sample_ids=range(len(sequences)))
    batch = with_kept(batch, [completion.kept for completion in found], lengths)
    (stats,) = actor.log_probs([batch], 0.8)
    return unpack(batch, stats.log_probs, lengths)


@pytest.fixture(scope="module")
def folder(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling") / "model"
    shutil.copytree(models / "qwen2" / "a", folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return run_ranks(sample, 1, folder)[0]


def test_a_form_that_vllm_cannot_read_is_refused_in_a_line(found):
    assert found["refused"].startswith("rollout.sampling: vLLM refuses a request: ")
    assert found["refused"].endswith("change the option of rollout.sampling that it names")


def decoded(completion: Any) -> str:
    """One character for each token, other ones for those without a text."""
    texts = {END: "", **{FIRST + place: text for place, text in enumerate(TEXT)}}
    return "".join(texts.get(token, "¿") for token in completion.tokens.tolist())


def test_engine_and_trainer_agree_over_the_kept_tokens(found, folder):
    """With top_k, top_p and min_p: trained log-probs are of the distribution that was drawn from."""
    asked = requests(0.9, **CUTS)
    (expected,) = run_ranks(trained, 1, folder, asked, found["cut"])
    for completion, log_probs in zip(found["cut"], expected, strict=True):
        assert np.abs(completion.log_probs - log_probs).max() < 1e-5
        assert completion.kept.counts.tolist() == [len(set(own)) for own in sets(completion.kept)]
        assert all(token in own for token, own in zip(completion.tokens, sets(completion.kept), strict=True))
    counts = np.concatenate([completion.kept.counts for completion in found["cut"]])
    assert counts.max() <= CUTS["top_k"]
    assert len(set(counts)) > 3  # top_p and min_p cut further, token by token


def sets(kept: KeptTokens) -> list[list[int]]:
    return [part.tolist() for part in np.split(kept.tokens, np.cumsum(kept.counts)[:-1])]


def test_nothing_is_kept_of_greedy_requests_and_those_without_top_k(found):
    """Though another data source's top_k makes the engine record kept tokens."""
    for name in ("free", "greedy", "nucleus"):
        assert all(completion.kept is None for completion in found[name])


def test_a_response_in_two_parts_keeps_the_same_tokens(found):
    assert len(found["in two parts"]) > 2
    for key, (begun, rest) in found["in two parts"].items():
        whole = found["cut"][key]
        assert [*begun.tokens, *rest.tokens] == whole.tokens.tolist()
        assert sets(KeptTokens.joined([begun.kept, rest.kept])) == sets(whole.kept)
        late = found["late"][key]
        assert len(late.tokens) == 3
        assert sets(late.kept) == sets(whole.kept[4:7])
    assert found["forgotten"]


def test_texts_and_tokens_end_a_turn(found):
    stop = found["stop"]
    ended = [stop in decoded(completion) for completion in found["stopped"]]
    assert any(ended)
    for completion, whole in zip(found["stopped"], found["free"], strict=True):
        text = decoded(completion)
        assert text == (decoded(whole).partition(stop)[0] + stop if stop in text else decoded(whole))
        assert completion.truncated == whole.truncated * (stop not in text)
        assert completion.stop_tokens == 0
    assert [one.stop_tokens for one in found["stopped, not trained"]] == [len(stop) * one for one in ended]
    end = int(found["free"][0].tokens[3])
    assert found["stop token"][0].tokens.tolist() == found["free"][0].tokens[:4].tolist()
    assert all(end not in completion.tokens[:-1] for completion in found["stop token"])


def test_words_lengths_and_biases(found):
    stop = found["stop"]
    assert any(stop in decoded(completion) for completion in found["free"])
    assert not any(stop in decoded(completion) for completion in found["bad words"])
    assert {len(completion.tokens) for completion in found["no stop before"]} <= {*range(8, LENGTH + 1)}
    assert any(len(completion.tokens) < LENGTH for completion in found["no stop before"])
    assert all(set(completion.tokens.tolist()) == {77} for completion in found["biased"])


def test_penalties_make_tokens_rarer(found):
    def repeated(name: str) -> int:
        return sum(len(completion.tokens) - len(set(completion.tokens.tolist())) for completion in found[name])

    assert repeated("penalized") < repeated("free") / 2


def test_structured_output(found):
    for completion in found["regex"]:
        assert re.fullmatch(r"ab[0-9]{3}c", decoded(completion)), decoded(completion)
    assert {decoded(completion) for completion in found["choice"]} == {"yes", "no"}
    for completion in found["json"]:
        if not completion.truncated:  # spaces may fill it
            assert json.loads(decoded(completion))["n"] in (1, 2, 3)
    assert any(not completion.truncated for completion in found["json"])
