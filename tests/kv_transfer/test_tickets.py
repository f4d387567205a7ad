"""Who may lead a reader where: every change of a signed ticket is seen, and nothing else is
followed.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv_transfer.tickets import LIFE_S, refusal, signed
from kvrelay.wire.transfer import KvTransferParams, Ticket

SECRET, OTHER = "the secret of this cluster", "the secret of this cluster."
NOW = 1_800_000_000.25

WORDS = st.text(max_size=40)
SIGNED = {
    "remote_engine_id": WORDS,
    "generation": WORDS,
    "remote_request_id": WORDS,
    "lease_epoch": st.integers(0, 2**63 - 1),
    "remote_host": WORDS,
    "remote_port": st.integers(0, 65535),
    "tp_size": st.integers(1, 8),
    "remote_block_ids": st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=5), max_size=3),
    "num_tokens": st.integers(0, 2**63 - 1),
    "growing": st.booleans(),
    "adapter": st.text(max_size=5),
    "adapter_digest": st.text(max_size=5),
}
SEAL = {"expires_at": st.integers(), "signature": st.text(max_size=70)}
TICKETS = st.builds(Ticket, **SIGNED)

TICKET = Ticket(
    remote_engine_id="prefill-1", generation="g", remote_request_id="r", lease_epoch=3,
    remote_host="10.0.0.1", remote_port=4000, remote_block_ids=[[4, 5]], num_tokens=20,
)  # fmt: skip


def travelled(ticket: Ticket) -> Ticket:
    """After JSON, a proxy, and the engine's msgpack."""
    sent = KvTransferParams(seed=7).with_ticket(ticket)
    there = msgspec.json.decode(msgspec.json.encode(sent), type=KvTransferParams).ticket()
    return msgspec.msgpack.decode(msgspec.msgpack.encode(there), type=Ticket)


def changed(ticket: Ticket, **fields: object) -> Ticket:
    return msgspec.structs.replace(ticket, **fields)


def test_every_field_is_signed() -> None:
    assert set(Ticket.__struct_fields__) == {*SIGNED, *SEAL}


@given(ticket=TICKETS, now=st.floats(0, 4e9))
def test_a_signed_ticket_is_good_wherever_it_has_been(ticket: Ticket, now: float) -> None:
    given_away = travelled(signed(ticket, SECRET, now))
    assert refusal(given_away, SECRET, now) is None
    assert changed(given_away, expires_at=None, signature=None) == ticket


@given(ticket=TICKETS, data=st.data(), name=st.sampled_from(sorted(SIGNED | SEAL)))
def test_any_other_value_in_any_field_breaks_the_signature(
    ticket: Ticket, data: st.DataObject, name: str
) -> None:
    given_away = signed(ticket, SECRET, NOW)
    was, values = getattr(given_away, name), (SIGNED | SEAL)[name]
    other = data.draw(values.filter(lambda value: value != was))
    assert "altered" in (refusal(changed(given_away, **{name: other}), SECRET, NOW) or "")


def test_none_of_ten_thousand_stale_or_foreign_tickets_is_followed() -> None:
    rng, given_away = random.Random(1), signed(TICKET, SECRET, NOW)
    for _ in range(10_000):
        late_s, number = rng.randrange(LIFE_S + 1, 1 << 30), rng.randrange(1 << 40)
        others = {
            "generation": str(number),
            "lease_epoch": 4 + number,
            "remote_port": number % 4000,
        }
        name = rng.choice([*others])
        for ticket, now, why in (
            (given_away, NOW + late_s, "the ticket expired"),
            (changed(given_away, **{name: others[name]}), NOW, "the ticket was altered"),
            (signed(TICKET, f"{OTHER}{number}", NOW), NOW, "or signed with another cluster_secret"),
        ):
            assert why in (refusal(ticket, SECRET, now) or "")


def test_neighbours_cannot_exchange_letters() -> None:
    given_away = signed(changed(TICKET, remote_engine_id="ab", generation="c"), SECRET, NOW)
    assert (
        refusal(changed(given_away, remote_engine_id="a", generation="bc"), SECRET, NOW) is not None
    )


def test_another_cluster_is_not_the_audience() -> None:
    verdict = refusal(signed(TICKET, OTHER, NOW), SECRET, NOW)
    assert verdict is not None
    assert "another cluster_secret; set the same KVRELAY_CLUSTER_SECRET on all nodes" in verdict
    assert SECRET not in verdict


def test_an_unsigned_ticket_leads_nowhere_in_a_cluster_with_a_secret() -> None:
    given_away = signed(TICKET, SECRET, NOW)
    for bare in (TICKET, changed(given_away, signature=None), changed(given_away, expires_at=None)):
        assert "not signed" in (refusal(bare, SECRET, NOW) or "")


@pytest.mark.parametrize(
    ("later_s", "good"), [(-300, True), (0, True), (LIFE_S - 1, True), (LIFE_S + 2, False)]
)
def test_a_ticket_expires_by_the_readers_clock_which_may_be_minutes_off(
    later_s: float, good: bool
) -> None:
    verdict = refusal(signed(TICKET, SECRET, NOW), SECRET, NOW + later_s)
    assert (verdict is None) == good
    assert good or "the ticket expired 2 s ago by this node's clock" in str(verdict)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1"])
def test_without_a_secret_a_ticket_is_plain_and_leads_to_this_machine(host: str) -> None:
    ticket = changed(TICKET, remote_host=host)
    assert signed(ticket, "", NOW) == ticket
    assert refusal(ticket, "", NOW) is None


@pytest.mark.parametrize(
    "host",
    ["10.0.0.1", "node-1", "0.0.0.0", "::", "127.0.0.1.evil.example", "2130706433", "", None],
)
def test_without_a_secret_a_ticket_leads_to_no_other_machine(host: str | None) -> None:
    verdict = refusal(changed(TICKET, remote_host=host), "", NOW)
    assert verdict is not None
    assert "to a loopback address only" in verdict


def test_a_node_without_a_secret_names_what_it_lacks() -> None:
    ticket = signed(changed(TICKET, remote_host="127.0.0.1"), SECRET, NOW)
    assert "this node has no cluster_secret to check it; set the same" in (
        refusal(ticket, "", NOW) or ""
    )
