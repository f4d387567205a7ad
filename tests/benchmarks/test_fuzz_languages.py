"""What fuzz makes of grammars whose rules stand in each other: of every size, and slow only in an
answer.
"""

from __future__ import annotations

import pytest

from kvrelay.paged_engine.grammar import Grammars
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import Constraint
from tests.soak.fuzz.languages import LANGUAGES

_RULES = 400


@pytest.mark.parametrize("language", ["Lark", "GBNF"])
@pytest.mark.parametrize("where", ["", ", behind a text"])
def test_rules_in_each_other_reach_the_limit_of_rules_and_are_refused_by_their_tokens(
    language: str, where: str
) -> None:
    tokens = [b"<end>", *(bytes([byte]) for byte in range(1, 256))]
    grammars = Grammars(tokens, special_ids=[0], eos_token_ids=[0])
    make = LANGUAGES["grammar"][f"{language}: rules in each other{where}"]
    small, largest = (Constraint("grammar", make(size)) for size in (4, _RULES))
    grammars.try_out(small.check())
    grammars.matcher(largest.check())
    with pytest.raises(RequestError, match="make it simpler"):
        grammars.try_out(largest)
    with pytest.raises(RequestError, match="401 rules"):
        Constraint("grammar", make(_RULES + 1)).check()
