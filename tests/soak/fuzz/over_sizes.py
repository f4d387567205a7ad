"""Requests that are large in one place: depth, repetition and size of every field, up to each
limit.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

from msgspec import inspect

from kvrelay.openai_api.dialects.responses_request import ResponsesRequest
from kvrelay.openai_api.json_body import MAX_CONTAINERS
from tests.soak.chaos.processes import Node
from tests.soak.fuzz.examples import LEADS_AWAY
from tests.soak.fuzz.languages import LANGUAGES, NUMBERED, Program, Site, sites
from tests.soak.fuzz.over_http import AT_ONCE, MOST_HEARD, exchange, judged, written
from tests.soak.fuzz.sizes import MAX_BODY, Generator, generators, ladder
from tests.soak.fuzz.stand import Stand
from tests.soak.fuzz.table import ROUTES, Route, places
from tests.soak.fuzz.watch import Watch, still_busy

__all__ = ["TARGETS", "Case", "cases", "round_of", "sizes", "small"]

TARGETS = ("sizes", "languages")
_PER_ROUND = 12
_TURNS = 24
"""A conversation has so many at most, if it is not refused before."""
_RESPONSE_ID = re.compile(rb'"id":"(resp_\w+)"')
_AGAIN = 6
"""Times that the largest size of some cases is played in a row: what each leaves behind shows."""
_MOST_NUMBER = 2**63
_SMALL = 4
_LEAVES_S = 0.1
_SLOW_S = 1.0
"""Behind an answer that took longer it is asked whether somebody goes on computing."""

_EMPTY = b'{"type":"reasoning","summary":[]}'
_CONVERSATIONS: Mapping[str, tuple[Callable[[int], bytes], int]] = {
    "reasonings": (lambda n: _EMPTY + (b"," + _EMPTY) * (n - 1), MAX_CONTAINERS // 2 - 8),
    "a long reasoning": (lambda n: b'%b,"unread":"%b"}' % (_EMPTY[:-1], b"a" * n), 0),
}
"""Items of a turn that are kept and cost no token; and how many of them there may be, where a size
counts items.
"""


@dataclass(frozen=True)
class Case:
    """Bodies for a route that grow in one place. `goes_on`: each from the stored answer to the one
    before.
    """

    route: Route
    place: str
    generator: Generator
    goes_on: bool = False

    @property
    def name(self) -> str:
        return f"{self.route.path} {self.place}: {self.generator.name}"


@cache
def cases(target: str) -> tuple[Case, ...]:
    """All of a target: "sizes" of every field, or "languages" in those that speak one."""
    return tuple(_of_languages() if target == "languages" else _of_fields())


def round_of(target: str, seed: int, number: int, only: str = "") -> list[Case]:
    shuffled = _shuffled(target, random.Random(f"{seed} {target}"))
    named = [case for case in shuffled if only in case.name]
    every, conversations = (
        [case for case in named if case.goes_on is wanted] for wanted in (False, True)
    )
    first = number * _PER_ROUND
    return [
        *(conversations[number % len(conversations)] for _ in conversations[:1]),
        *(every[at % len(every)] for at in range(first, first + min(_PER_ROUND, len(every)))),
    ]


async def small(stand: Stand, rng: random.Random) -> tuple[int, list[str]]:
    """Play every generator once, at a size that any server takes. Returns how many, and what is
    wrong.
    """
    firsts = list(
        {
            case.generator.name: case for target in TARGETS for case in _shuffled(target, rng)
        }.values()
    )
    wrong: list[str] = []
    for at in range(0, len(firsts), AT_ONCE):
        some = firsts[at : at + AT_ONCE]
        servers = [_server(stand, rng, case.route) for case in some]
        sent = [
            _written(stand, server, case, _SMALL)
            for server, case in zip(servers, some, strict=True)
        ]
        answers = await asyncio.gather(
            *(exchange(to.ports[0], [data]) for to, data in zip(servers, sent, strict=True))
        )
        for case, answer in zip(some, answers, strict=True):
            if said := judged(answer):
                wrong.append(f"{case.name}, size {_SMALL}: {said}")
    return len(firsts), wrong


async def sizes(
    stand: Stand, watch: Watch, rng: random.Random, played: list[Case], most_bytes: int = MAX_BODY
) -> list[str]:
    """Play the cases. Returns what is wrong: the first thing, with the field, the generator and the
    size.
    """
    for case in played:
        process = _server(stand, rng, case.route)
        if case.goes_on:
            if wrong := await _conversations(stand, watch, process, case, most_bytes):
                return wrong
            continue
        at_once, leaves, again = rng.choice((1, 1, 1, 4)), rng.random() < 0.25, rng.random() < 0.25
        held = 0
        # Large values take seconds to make on a busy machine, and leases are renewed meanwhile.
        steps = await asyncio.to_thread(ladder, rng, case.generator, most_bytes)
        for size in [*steps, *steps[-1:] * (_AGAIN * again)]:
            wrong = await _played(stand, watch, process, case, size, at_once, leaves)
            if wrong:
                who = f"{at_once} client{'s' * (at_once > 1)}{' that left at once' * leaves}"
                return [
                    f"{process.role} {case.name}, size {size} ({held} was harmless), {who}: {one}"
                    for one in wrong
                ]
            held = size
    return []


async def _conversations(
    stand: Stand, watch: Watch, process: Node, case: Case, most_bytes: int
) -> list[str]:
    top = case.generator.capped(most_bytes)
    for size in sorted({1, max(1, top // 256), max(1, top // 2), top}):
        body, previous = await asyncio.to_thread(case.generator.make, size), b""
        for turn in range(1, _TURNS + 1):
            sent = _request(stand, process, case.route, _going_on(body, previous))
            wrong, answers = await _asked(stand, watch, process, sent)
            # What was stored is read for whoever goes on from it, however little he sends.
            short = case.route.body({"input": b'"a"', "store": b"false"})
            if not wrong and previous:
                sent = _request(stand, process, case.route, _going_on(short, previous))
                wrong, _ = await _asked(stand, watch, process, sent)
            if wrong:
                return [
                    f"{process.role} {case.name}, size {size}, turn {turn}: {one}" for one in wrong
                ]
            found = _RESPONSE_ID.search(answers[0] or b"")
            if found is None:  # it is refused
                break
            previous = found[1]
    return []


def _going_on(body: bytes, previous: bytes) -> bytes:
    return b'{"previous_response_id":"%b",%b' % (previous, body[1:]) if previous else body


async def _played(
    stand: Stand, watch: Watch, process: Node, case: Case, size: int, at_once: int, leaves: bool
) -> list[str]:
    sent = await asyncio.to_thread(_written, stand, process, case, size)
    return (await _asked(stand, watch, process, sent, at_once, leaves))[0]


async def _asked(
    stand: Stand,
    watch: Watch,
    process: Node,
    sent: bytes,
    at_once: int = 1,
    leaves: bool = False,
) -> tuple[list[str], list[bytes | None]]:
    began, leaves_s, wrong = time.monotonic(), _LEAVES_S if leaves else None, list[str]()
    asking = [
        asyncio.create_task(exchange(process.ports[0], [sent], leaves_s=leaves_s))
        for _ in range(at_once)
    ]
    try:
        waiting = set(asking)
        while waiting and not wrong:  # a server that stands still is not waited for
            _, waiting = await asyncio.wait(waiting, timeout=_SLOW_S)
            wrong = await watch.look()
    finally:
        for each in waiting:
            each.cancel()
    silent = leaves or len(sent) > MOST_HEARD
    answers = [each.result() for each in asking if each.done()]
    wrong = [said for answer in answers if (said := judged(answer, may_be_silent=silent))][
        :1
    ] + wrong
    wrong += stand.ended()
    slow = leaves or time.monotonic() - began > _SLOW_S
    return wrong or (await still_busy(stand.processes) if slow else []), answers


def _shuffled(target: str, rng: random.Random) -> list[Case]:
    return rng.sample(cases(target), len(cases(target)))


def _of_fields() -> Iterator[Case]:
    def made(route: Route, name: str, value: Generator, body: Callable[[bytes], bytes]) -> Case:
        return Case(route, name, Generator(value.name, lambda n: body(value.make(n)), value.most))

    anything = generators([inspect.AnyType()])
    for route in ROUTES:
        yield made(route, "(the body)", Generator("closing brackets", lambda n: b"]" * n), bytes)
        yield from (made(route, "(the body)", value, bytes) for value in anything)
        yield from (
            made(route, "(unknown)", value, partial(_with_unknown, route)) for value in anything
        )
        for place in places(route):
            at_home = bool(LEADS_AWAY.intersection(place.steps))
            yield from (
                made(route, place.name, value, place.body)
                for value in generators(place.types, at_home=at_home)
            )

        if {"tools", "tool_choice"} <= route.fields.keys():
            yield Case(
                route,
                "tools, tool_choice",
                Generator("allowed tools", partial(_with_allowed_tools, route)),
            )
        if route.asks.__name__ == ResponsesRequest.__name__:
            for name, (items, most) in _CONVERSATIONS.items():
                turns = Generator(f"conversation of {name}", partial(_turn, route, items), most)
                yield Case(route, "previous_response_id", turns, goes_on=True)


def _turn(route: Route, items: Callable[[int], bytes], size: int) -> bytes:
    return route.body({"input": b'[%b,{"role":"user","content":"a"}]' % items(size)})


def _with_allowed_tools(route: Route, count: int) -> bytes:
    tools = b",".join(
        b'{"type":"function","name":"a%d","function":{"name":"a%d"}}' % (i, i) for i in range(count)
    )
    names = b",".join(b'{"name":"b%d"}' % i for i in range(count))
    choice = b'{"type":"allowed_tools","mode":"auto","tools":[%b]}' % names
    return route.body({"tools": b"[%b]" % tools, "tool_choice": choice})


def _with_unknown(route: Route, value: bytes) -> bytes:
    return route.body({"unknown": value})


def _of_languages() -> Iterator[Case]:
    for route in ROUTES:
        for site in sites(route):
            for programs, most in ((LANGUAGES, 0), (NUMBERED, _MOST_NUMBER)):
                for name, program in programs.get(site.language, {}).items():
                    make = partial(_program, route, site, program)
                    yield Case(route, site.name, Generator(f"{site.language}: {name}", make, most))


def _program(route: Route, site: Site, program: Program, size: int) -> bytes:
    return site.body(route, program(size))


def _server(stand: Stand, rng: random.Random, route: Route) -> Node:
    if route.key == "node":
        return stand.nodes[0]
    return (
        stand.router
        if route.key == "admin"
        else rng.choice((stand.router, stand.router, *stand.nodes))
    )


def _written(stand: Stand, process: Node, case: Case, size: int) -> bytes:
    return _request(stand, process, case.route, case.generator.make(size))


def _request(stand: Stand, process: Node, route: Route, body: bytes) -> bytes:
    return written(
        "POST", route.path, stand.keys["node" if process is not stand.router else route.key], body
    )
