"""Rate cards that a router starts with: which files speak of which nodes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from planning.rate_card import RateCard, read_card
from wire.config import Role
from wire.errors import ConfigError

__all__ = ["read_cards"]

_ROLES = (Role.PREFILL, Role.DECODE)


def read_cards(named: Iterable[tuple[str, str]]) -> dict[tuple[Role, str], RateCard]:
    """Cards by role and model, of (role, file); an empty role stands for both. Raises ConfigError.

    A card for one role wins over one for both."""
    cards: dict[tuple[Role, str], RateCard] = {}
    files: dict[tuple[str, str], str] = {}
    for role, file in sorted(named, key=lambda each: bool(each[0])):
        card = read_card(Path(file))
        other = files.setdefault((role, card.model), file)
        if other != file:
            raise ConfigError(
                f"the rate cards {other} and {file} are both about {role or 'all'} nodes of {card.model!r}; leave one "
                "out, or name them as prefill=FILE and decode=FILE"
            )
        cards |= {(each, card.model): card for each in _ROLES if role in ("", each)}
    return cards
