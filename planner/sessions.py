"""Sessions of turns as requests that follow each other, with named blocks of what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.load.workloads import Session, Turn
from kvrelay.planner.setting import Stream

__all__ = ["streams_of_sessions"]

_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class _Context:
    """A session's text so far, as tokens and names of full blocks."""

    tokens: int = 0
    blocks: tuple[int, ...] = ()

    def said(self, name: int, tokens: int, size: int) -> _Context:
        total, blocks = self.tokens + tokens, list(self.blocks)
        for at in range(len(blocks), total // size):
            blocks.append(hash((blocks[-1] if blocks else 0, name, at)) & _MASK)
        return _Context(total, tuple(blocks))


def streams_of_sessions(sessions: Sequence[Session], clients: int, block_size: int) -> list[Stream]:
    """Return the turns of sessions, of which each client works off every `clients`-th.

    The clients begin one after the other, within a quarter of a usual session's gaps. Without
    clients each session has its own time.
    """
    made: list[Stream] = []
    gaps = sum(turn.think_s for each in sessions for turn in each.all_turns)
    ends: list[Stream | None] = [None] * clients
    for session in sessions:
        client, context = session.number % max(1, clients), _Context()
        if session.system is not None:
            for name, tokens in session.system.pieces:
                context = context.said(4 * name, tokens, block_size)
        first, before = len(made), ends[client] if clients else None
        last = _follow(made, session, session.turns, context, before, block_size)
        if clients:
            made[first].at = 250 * gaps / len(sessions) * client / clients
            ends[client] = last
        else:
            made[first].at = 1e3 * session.at
    return made


def _follow(
    made: list[Stream],
    session: Session,
    turns: Sequence[Turn],
    context: _Context,
    before: Stream | None,
    size: int,
) -> Stream | None:
    """Add turns that follow `before`, and return the last."""
    contexts = [context]
    for turn in turns:
        inner = [
            _follow(made, session, branch.turns, contexts[branch.keeps], before, size)
            for branch in turn.branches
        ]
        asked = contexts[-1]
        for name, tokens in turn.pieces:
            asked = asked.said(4 * name, tokens, size)
        output = max(2, turn.output)  # a second token needs a decode node
        said = 4 * turn.pieces[0][0] + 1
        answer = asked.said(said, output - 1, size) if len(turns) > 1 else asked
        contexts.append(asked.said(said, output, size))
        stream = Stream(
            0.0,
            asked.tokens,
            output,
            asked.blocks,
            f"{session.number}",
            answer=answer.blocks[len(asked.blocks) :],
            gap=1e3 * turn.think_s,
        )
        for each in inner or [before]:
            if each is not None:
                each.then.append(stream)
                stream.waits += 1
        made.append(stream)
        before = stream
    return before
