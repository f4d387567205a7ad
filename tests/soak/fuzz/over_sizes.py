"""Requests that are large in one place: depth, repetition and size of every field, up to each
limit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from msgspec import inspect

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
_PER_ROUND = 6
_AGAIN = 6
"""Times that the largest size of some cases is played in a row: what each leaves behind shows."""
_MOST_NUMBER = 2**63
_SMALL = 4
_LEAVES_S = 0.1
_SLOW_S = 1.0
"""Behind an answer that took longer it is asked whether somebody goes on computing."""


@dataclass(frozen=True)
class Case:
    """Bodies for a route that grow in one place."""

    route: Route
    place: str
    generator: Generator

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
    first = number * _PER_ROUND
    return [named[at % len(named)] for at in range(first, first + min(_PER_ROUND, len(named)))]


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


async def _played(
    stand: Stand, watch: Watch, process: Node, case: Case, size: int, at_once: int, leaves: bool
) -> list[str]:
    sent = await asyncio.to_thread(_written, stand, process, case, size)
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
    return wrong or (await still_busy(stand.processes) if slow else [])


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
    key = case.route.key if process is stand.router else "node"
    return written("POST", case.route.path, stand.keys[key], case.generator.make(size))
