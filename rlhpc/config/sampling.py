"""How tokens of responses are drawn, beside temperature and top_p; see docs/sampling.md."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rlhpc.config.section import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share

# The most tokens of which an engine returns the set that a token was drawn from: it bounds what travels with a token.
MAX_KEPT = 512
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, Field(min_length=1)]


class StructuredOutputSection(Section):
    """A form that turns must have, by one of the keys."""

    json_schema: dict[str, Any] | None = None
    """JSON schema of a response."""
    regex: _Text | None = None
    """Regular expression of a whole response."""
    choice: list[_Text] | None = None
    """Texts of which a response is one."""
    grammar: _Text | None = None
    """Grammar of a response in EBNF."""

    @property
    def given(self) -> dict[str, Any]:
        """The keys that have a value."""
        return {name: value for name, value in self if value is not None}


class SamplingSection(Section):
    top_k: PositiveInt | None = None
    """Number of most probable tokens that one is drawn from; default: all. Up to 512 the loss trains the distribution
    over the same tokens."""
    min_p: Share = 0.0
    """Minimum probability of a token, as a fraction of the most probable one's."""
    repetition_penalty: PositiveFloat = 1.0
    """Divisor of positive logits, and factor of negative ones, of tokens in the prompt and the response so far."""
    presence_penalty: _Penalty = 0.0
    """Subtracted from logits of tokens in the turn so far."""
    frequency_penalty: _Penalty = 0.0
    """Subtracted from a token's logit for each time that it is in the turn so far."""
    logit_bias: dict[NonNegativeInt, float] = {}
    """Added to logits, by token id."""
    min_tokens: NonNegativeInt = 0
    """Minimum length of a response in tokens: until then no token that ends it is drawn."""
    stop: list[_Text] = []
    """Texts that end a turn, and are its end."""
    train_on_stop: bool = True
    """Whether tokens of the text that ended a turn are trained on."""
    stop_token_ids: list[NonNegativeInt] = []
    """Further token ids that end a turn."""
    bad_words: list[_Text] = []
    """Texts that are not generated."""
    structured_output: StructuredOutputSection | None = None
    """A form that each turn must have: JSON, a regular expression, a choice or a grammar."""

    @property
    def needs_text(self) -> bool:
        """Whether the engine must have a tokenizer."""
        return bool(self.stop or self.bad_words or self.structured_output)


class SamplingOverrides(Section):
    """Keys that replace those of rollout.sampling; null: as there. All are optional, so that a configuration that was
    written with every key says the same."""

    top_p: Fraction | None = None
    """Nucleus sampling threshold; default: rollout.top_p."""
    top_k: NonNegativeInt | None = None
    """Number of most probable tokens that one is drawn from; 0: all."""
    min_p: Share | None = None
    """Minimum probability of a token, as a fraction of the most probable one's."""
    repetition_penalty: PositiveFloat | None = None
    """As rollout.sampling.repetition_penalty."""
    presence_penalty: _Penalty | None = None
    """As rollout.sampling.presence_penalty."""
    frequency_penalty: _Penalty | None = None
    """As rollout.sampling.frequency_penalty."""
    logit_bias: dict[NonNegativeInt, float] | None = None
    """Added to logits, by token id."""
    min_tokens: NonNegativeInt | None = None
    """Minimum length of a response in tokens."""
    stop: list[_Text] | None = None
    """Texts that end a turn."""
    train_on_stop: bool | None = None
    """Whether tokens of the text that ended a turn are trained on."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """Further token ids that end a turn."""
    bad_words: list[_Text] | None = None
    """Texts that are not generated."""
    structured_output: StructuredOutputSection | None = None
    """A form that each turn must have."""

    @property
    def given(self) -> dict[str, Any]:
        """The keys that have a value, as rollout.sampling has them."""
        found = {name: value for name, value in self if value is not None}
        return found | ({"top_k": None} if self.top_k == 0 else {})


class ResolvedSampling(SamplingSection):
    """All that responses of a data source are sampled with, but for the temperature."""

    top_p: Fraction = 1.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens have no chance though the model gives them one."""
        cut = self.top_p < 1 or self.top_k is not None or self.min_p > 0
        return bool(cut or self.min_tokens or self.bad_words or self.structured_output)

    @property
    def returns_kept(self) -> bool:
        """Whether the engine returns the tokens that one was drawn from."""
        return self.top_k is not None and self.top_k <= MAX_KEPT

    @property
    def shifts(self) -> tuple[str, ...]:
        """Keys by which kept tokens have other probabilities, relative to each other, than the model's."""
        neutral: dict[str, Any] = {
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
        }
        return tuple(name for name, value in neutral.items() if getattr(self, name) != value)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Keys that truncate the distribution while the engine does not return the kept tokens."""
        if not self.truncates or self.returns_kept:
            return ()
        neutral: dict[str, Any] = {"top_p": 1.0, "top_k": None, "min_p": 0.0, "min_tokens": 0, "bad_words": []}
        found = [name for name, value in neutral.items() if getattr(self, name) != value]
        return (*found, *(["structured_output"] if self.structured_output else []))

    def replaced(self, overrides: SamplingOverrides | None) -> ResolvedSampling:
        """The same with the keys that ``overrides`` gives."""
        return self if overrides is None else self.model_copy(update=overrides.given)
