"""Where a prompt is computed, by costs in milliseconds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.nodes.node import Node
from router.policies.policy import Ask, NodeView
from router.walk.conditional import MOST_STEPS, Reason, decide
from wire.config import Role
from wire.outputs import Load


def ask(tokens: int, **cached: int) -> Ask:
    return Ask(Role.PREFILL, tokens=tokens, cached=cached)


def test_a_short_uncached_rest_stays_on_an_idle_decode_node() -> None:
    decision = decide(ask(2_000, d=1_980), NodeView("p"), NodeView("d"))
    assert (decision.local, decision.reason) == (True, Reason.CHEAPER)
    assert decision.local_ms < decision.handover_ms


def test_what_the_prefill_node_has_in_its_cache_is_handed_over() -> None:
    decision = decide(ask(600, p=600), NodeView("p"), NodeView("d"))
    assert (decision.local, decision.reason) == (False, Reason.HANDOVER_CHEAPER)


def test_running_streams_keep_a_prompt_away() -> None:
    assert decide(ask(300), NodeView("p"), NodeView("d")).local
    decision = decide(ask(300), NodeView("p"), NodeView("d", requests=20))
    assert (decision.local, decision.reason) == (False, Reason.STREAMS_WAIT)


def test_a_queue_before_the_prefill_node_keeps_short_prompts_on_the_decode_node() -> None:
    assert decide(ask(300), NodeView("p", 4, 20_000), NodeView("d", requests=20)).local


def test_without_room_a_prompt_goes_where_its_kv_can_wait() -> None:
    decision = decide(ask(300), NodeView("p"), NodeView("d", kv_room=100))
    assert (decision.local, decision.reason) == (False, Reason.NO_ROOM)


def in_time(tokens: int, ttft_ms: float, tpot_ms: float) -> Ask:
    return Ask(Role.PREFILL, tokens=tokens, ttft_ms=ttft_ms, tpot_ms=tpot_ms)


def test_a_first_token_that_would_be_late_comes_from_the_decode_node_if_its_streams_can_spare_the_time() -> None:
    waiting, decode = NodeView("p", 4, 8_000), NodeView("d", requests=20)
    assert decide(in_time(1_000, 200, 30), NodeView("p"), decode).reason is not Reason.IN_TIME  # it is in time there
    decision = decide(in_time(1_000, 200, 30), waiting, decode)
    assert (decision.local, decision.reason) == (True, Reason.IN_TIME)
    assert not decide(ask(1_000), waiting, decode).local  # nobody has said what late is
    assert not decide(in_time(1_000, 30, 30), waiting, decode).local  # it would be late there, too
    assert not decide(in_time(1_000, 200, 10), waiting, decode).local  # streams take 10 ms already
    assert not decide(in_time(3_000, 400, 30), NodeView("p", 4, 30_000), decode).local  # too long a stall
    assert not decide(in_time(1_000, 68, 30), waiting, decode).local  # 45 ms, and 10 for the decodes of its step
    begun = NodeView("d", 20, 1_000)  # a prompt like it is half computed
    assert decide(in_time(1_000, 98, 30), waiting, begun).local
    assert not decide(in_time(1_000, 92, 30), waiting, begun).local
    busy = NodeView("d", 20, 4_000)  # of prompts that are there already
    assert not decide(in_time(1_000, 200, 30), waiting, busy).local


def test_what_others_usually_have_on_the_prefill_node_and_have_not_now_keeps_no_prompt_on_the_decode_node() -> None:
    prefill, decode = Node("p", role=Role.PREFILL), NodeView("d", requests=20)
    for _ in range(300):
        prefill.note_load(Load(running=60, waiting_tokens=20_000))
    assert decide(ask(300), prefill, decode).local
    prefill.note_load(Load())
    assert prefill.requests > 40
    assert not decide(ask(300), prefill, decode).local
    assert not decide(in_time(1_000, 200, 30), prefill, decode).local


nodes = st.builds(NodeView, st.just("n"), st.integers(0, 200), st.integers(0, 100_000), st.floats(0, 1e6))


@given(st.integers(1, 200_000), nodes, nodes)
@settings(max_examples=80)
def test_a_long_prompt_never_stays_and_more_streams_or_tokens_never_bring_one_back(
    tokens: int, prefill: NodeView, decode: NodeView
) -> None:
    decision = decide(ask(tokens), prefill, decode)
    assert decision.local == (decision.reason is Reason.CHEAPER)  # without targets
    if decision.local:
        assert decode.rates.prefill_ms(tokens) <= MOST_STEPS * decode.rates.step_ms(decode.requests + 1)
        assert decision.local_ms < decision.handover_ms
    busier = NodeView("n", decode.requests, decode.tokens + 50, decode.kv_room)
    assert decide(ask(tokens), prefill, busier).local <= decision.local
    assert not decide(ask(max(tokens, 50_000)), prefill, decode).local
