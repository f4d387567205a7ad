"""KV room by credit, the queue for it, and the retry budget."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.nodes.credit import Credit, Reservation, blocks_of, likely_kv_tokens
from router.nodes.node import Lease, Node
from router.nodes.room import RoomQueue, Waiter, has_room, with_room
from router.policies.policy import Ask
from router.walk.retries import FLOOR, SHARE, WINDOW_S, RetryBudget
from wire.config import Role
from wire.outputs import Load


def test_what_is_reserved_and_not_yet_in_the_report_is_not_left() -> None:
    credit = Credit()
    leg = credit.reserve(10)
    assert credit.left(50) == 40
    credit.holds(leg, 4)
    assert credit.left(50) == 40  # the report is older than that
    credit.reported()
    assert credit.left(46) == 40
    credit.holds(leg, 12)  # longer than expected
    credit.reported()
    assert credit.left(38) == 38
    credit.give_back(leg)
    credit.reported()
    assert credit.left(50) == 50


@given(
    st.lists(st.tuples(st.sampled_from(["reserve", "hold", "report", "end"]), st.integers(0, 40), st.integers(0, 9)))
)
def test_sums_agree_with_a_count_of_all_legs(events: list[tuple[str, int, int]]) -> None:
    """As it would be if each leg were looked at; of legs that have ended the credit may be on the safe side."""
    credit, legs, counted, free = Credit(), list[Reservation](), dict[Reservation, int](), 1000
    ended_since = False
    for what, number, which in events:
        if what == "reserve":
            legs.append(credit.reserve(number))
        elif what == "report":
            credit.reported()
            counted, ended_since = {leg: leg.held for leg in legs}, False
            free = 1000 - sum(counted.values())
        elif legs and what == "hold":
            credit.holds(legs[which % len(legs)], number)
        elif legs:
            credit.give_back(legs.pop(which % len(legs)))
            ended_since = True
        exact = free - sum(leg.blocks - counted.get(leg, 0) for leg in legs)
        assert credit.left(free) <= exact
        if not ended_since:
            assert credit.left(free) == exact
    assert all(leg.held <= leg.blocks for leg in legs)


def decode_node(free: int, total: int = 100, running: int = 1) -> Node:
    node = Node("http://d", role=Role.DECODE, up=True)
    node.note_load(Load(running=running, free_blocks=free, total_blocks=total, block_size=16))
    return node


def ask(kv_tokens: int, priority: int = 0) -> Ask:
    """Of a leg that generates one token, of which it has no KV."""
    return Ask(Role.DECODE, kv_tokens=kv_tokens - 1, output_tokens=1, priority=priority)


def take(node: Node, kv_tokens: int) -> Lease:
    lease = Lease(node, 0, kv_tokens)
    node.take(lease)
    return lease


def test_room_is_what_reports_and_own_legs_leave() -> None:
    node = decode_node(free=10)
    assert has_room(node, ask(160))
    assert not has_room(node, ask(161))
    take(node, 100)
    assert has_room(node, ask(48))
    assert not has_room(node, ask(49))
    assert has_room(decode_node(free=0, running=0), ask(10**6))  # an idle node has what it has
    assert has_room(Node("http://v", role=Role.DECODE), ask(10**6))  # and one that says nothing is asked
    assert has_room(decode_node(free=100, total=100), ask(10**6))  # what fits nowhere goes where nothing else is


def test_of_many_nodes_only_the_chosen_one_is_looked_at_if_it_has_room() -> None:
    small, large = [decode_node(free=1)] * 3, [decode_node(free=1)] * 100
    roomy = decode_node(free=20)

    def choose(asked: Ask, nodes: Sequence[Node]) -> tuple[Node, Ask]:
        return nodes[-1], asked

    assert with_room(ask(160), [*small, roomy, roomy], choose) == [roomy, roomy]
    assert with_room(ask(160), [roomy, *large, roomy], choose) == [roomy]
    assert with_room(ask(160), [roomy, *large], choose) == [roomy]  # not the chosen one
    assert with_room(ask(160), large, choose) == []


def queue_of(node: Node, wants: list[tuple[int, int]]) -> tuple[RoomQueue, list[int]]:
    """Waiters of (priority, tokens), and in which order they are given room."""
    queue, given = RoomQueue(), list[int]()
    for at, (priority, tokens) in enumerate(wants):

        def grant(nodes: object, at: int = at, tokens: int = tokens) -> None:
            take(node, tokens)
            given.append(at)

        queue.add(Waiter(ask(tokens, priority), lambda: [node], grant))
    return queue, given


def test_room_is_given_by_priority_then_in_order_and_nobody_overtakes() -> None:
    node = decode_node(free=4)
    queue, given = queue_of(node, [(0, 80), (0, 16), (-1, 32), (5, 1)])
    queue.turn([node])
    assert (given, len(queue)) == ([2], 3)  # two blocks are left, and the next one wants five
    node.note_load(Load(running=1, free_blocks=20, total_blocks=100, block_size=16))
    queue.turn([node])
    assert (given, len(queue)) == ([2, 0, 1, 3], 0)


def test_who_waits_for_other_nodes_is_not_held_up() -> None:
    full, roomy = decode_node(free=0), decode_node(free=50)
    queue, given = RoomQueue(), list[str]()
    queue.add(Waiter(ask(100), lambda: [full], lambda nodes: given.append("first")))
    second = Waiter(ask(100), lambda: [full, roomy], lambda nodes: given.append("second"))
    queue.add(second)
    queue.turn([full, roomy])
    assert given == ["second"]
    queue.drop(second)
    assert len(queue) == 1


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 300)), max_size=12), st.integers(0, 40))
def test_no_node_is_given_more_than_it_has(wants: list[tuple[int, int]], free: int) -> None:
    node = decode_node(free=free)
    queue, given = queue_of(node, wants)
    queue.turn([node])
    assert sum(blocks_of(wants[at][1], 16) for at in given) <= free
    order = sorted(range(len(wants)), key=lambda at: (wants[at][0], at))
    assert given == order[: len(given)]  # a prefix of the order: nobody has overtaken
    for _ in range(len(wants)):
        node.note_load(Load(running=1, free_blocks=1000, total_blocks=1000, block_size=16))
        queue.turn([node])
    assert given == order


def test_expected_output_needs_room_only_where_it_grows() -> None:
    node = decode_node(free=10)
    assert likely_kv_tokens(Ask(Role.PREFILL, tokens=100), node) == 100
    assert likely_kv_tokens(Ask(Role.DECODE, kv_tokens=100, output_tokens=7), node) == 107
    for _ in range(2000):
        node.rates.generated(40)
    assert likely_kv_tokens(Ask(Role.DECODE, tokens=100), node) == 140


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 30), st.integers(0, 30))))
def test_retries_never_exceed_their_share_of_the_window_and_the_floor(load: list[tuple[float, int, int]]) -> None:
    budget, now = RetryBudget(), 0.0
    requests, retries = list[int](), list[int]()
    for step, asked, wanted in load:
        now += step
        for _ in range(asked):
            budget.asked(now)
            requests.append(int(now))
        retries += [int(now) for _ in range(wanted) if budget.take(now)]
        recent = [sum(second > int(now) - WINDOW_S for second in each) for each in (requests, retries)]
        assert recent[1] <= FLOOR + SHARE * recent[0] + 1


def test_an_idle_router_may_retry_a_little_and_again_later() -> None:
    budget = RetryBudget()
    assert sum(budget.take(5.0) for _ in range(100)) == FLOOR
    assert not budget.take(5.0 + WINDOW_S - 1)
    assert budget.take(5.0 + WINDOW_S)
