"""`python -m tests.soak.sessions`: a minute of it, with the seed that is written here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.sessions import disturbed, running

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
pytest.importorskip("nixl")


def test_no_token_of_sessions_differs_while_their_kv_moves_and_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, seed=1, plain=True) as soak:
        disturbed(soak, clients=4, seconds=12, every_s=0.6, turns=20)
    assert soak.broken == []
    assert soak.counts["found"] > soak.counts["known"] / 4
    assert soak.counts["damaged files"] > 0
