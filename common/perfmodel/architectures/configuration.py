"""The values of a configuration: whole numbers and flags by key, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import UserError
from common.perfmodel.architectures.parts import Attention, Depth, FeedForward, Whole
from common.settings import Bound


@dataclass(frozen=True)
class Sizes:
    """The values of a model's configuration by key, as in ``config.json``."""

    values: Mapping[str, object] = field(repr=False)
    name: str

    def whole(self, key: str, default: int | None = None, rule: Bound = Whole) -> int:
        """Returns a whole positive number; the default where it is missing or null.

        Raises UserError for a value that breaks the ``rule``, and where there is no default.
        """
        number = self.values.get(key)
        if number is None and default is None:
            raise UserError(f"{key} is missing")
        if number is None:
            return default
        rule.check(key, number)
        return number

    def layers(self, key: str) -> int:
        """Returns a number of layers, as ``whole`` does."""
        return self.whole(key, rule=Depth)

    def flag(self, key: str, default: bool) -> bool:
        """Returns true or false; the default where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"{key} is {value!r}; it must be true or false")
        return value

    def share(self, key: str, default: float) -> float:
        """Returns a probability; the default where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise UserError(f"{key} is {value!r}; it must be a number from 0 to below 1")
        return value

    def part(self, key: str) -> Sizes:
        """Returns the values of an object inside; none where it is missing or null."""
        values = self.values.get(key) or {}
        if not isinstance(values, Mapping):
            raise UserError(f"{key} is {values!r}; it must be an object")
        return Sizes(values, self.name)

    def listed(self, key: str) -> list:
        """Returns the members of a list; none where it is missing or null."""
        values = self.values.get(key) or []
        if not isinstance(values, list):
            raise UserError(f"{key} is {values!r}; it must be a list")
        return values

    def refuse(self, *keys: str) -> None:
        """Raises UserError for an extension that is not modelled."""
        for key in keys:
            if self.flag(key, False):
                raise UserError(f"{key} is not modelled")

    def head(self, tied: bool) -> str:
        """Returns the kind of a language model's head; ``tied`` is the family's default."""
        return "tied" if self.flag("tie_word_embeddings", tied) else "own"

    def attention(
        self,
        heads: str = "num_attention_heads",
        width: str = "hidden_size",
        stated: Sequence[str] = (),
        **kinds: bool,
    ) -> Attention:
        """Returns the sizes of attention.

        Args:
            heads: key of the number of heads.
            width: key of the model's width, that of all heads where ``head_dim`` is missing.
            stated: keys that the family must state, as it derives them from no other.
            kinds: biases and other fields of ``Attention``.
        """
        for key in stated:
            self.whole(key)
        count, all_heads = self.whole(heads), self.whole(width)
        if self.values.get("head_dim") is None and all_heads % count:
            raise UserError(f"{width} {all_heads} is no multiple of {heads} {count}")
        return Attention(
            heads=count,
            key_value_heads=self.whole("num_key_value_heads", count),
            head_width=self.whole("head_dim", all_heads // count),
            **kinds,
        )

    def feed_forward(self, key: str = "intermediate_size", **kinds: bool) -> FeedForward:
        """Returns the sizes of a feed-forward part, whose width has this ``key``."""
        return FeedForward(width=self.whole(key), **kinds)
