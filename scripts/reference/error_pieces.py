"""The error tree of wire/errors.py, and what to do about each error."""

from __future__ import annotations

from collections.abc import Iterator

import kvrelay.wire.errors
from kvrelay.wire.errors import ConfigError, KvrelayError
from scripts.reference.markdown import code, table

__all__ = ["REMEDIES", "error_pieces", "tree"]

REMEDIES = {
    "KvrelayError": "A defect of ours. The log of the process that answered says more; report it.",
    "ConfigError": "The message says which value is wrong and what to write instead.",
    "RequestError": "`param` names the field, the message the limit. The same request fails "
    "again: change it.",
    "Unauthorized": "Send the key as `Authorization: Bearer KEY` or in `x-api-key`.",
    "Forbidden": "Use a key that may do this, or change `models`, `priority` or `admin` of this "
    "one.",
    "NotFound": "`GET /v1/models` lists the models; a router knows a node's model as soon as the "
    "node is up.",
    "RequestTimeout": "Send the whole body at once; check the network between client and router.",
    "Conflict": "The message names the conflict and how to proceed.",
    "BodyTooLarge": "Send less, or raise `--max-body-bytes` on the router and the nodes.",
    "Unavailable": "Try again after `Retry-After`.",
    "NoNode": "Start a node of that role. `GET /health` of the router says why each node is down.",
    "EngineDead": "Normal while a node starts. Afterwards the last line of its log says why.",
    "Draining": "Nothing: the router takes another node. Without a router, ask another node.",
    "Overloaded": "Wait for `Retry-After`; if it lasts, add nodes of the role that is busy.",
    "RateLimited": "Wait for `Retry-After`, or raise the key's limits.",
    "RequestBroke": "A defect of ours. The node's log has the traceback: report it.",
    "PoisonRequest": "Change the request. The router's log names the nodes by this id; their last "
    "log lines say why.",
    "NodeFailed": "Send the request again. The router's log line with this id names the node.",
    "KvNotLoaded": "Send the request again, or start decode nodes with `--kv-load-failure-policy "
    "recompute`.",
    "DeadlineExceeded": "Ask for fewer tokens, or raise `--request-deadline-s` on the router and "
    "the nodes.",
    "TransferError": "Nothing, for a client: the decode node computes what is missing. Watch "
    "`kvrelay_fetches_failed_total`.",
    "Incompatible": "Start all nodes with the same model, dtype, block size and KV dtype.",
    "PeerLost": "See why the prefill node ended; if it did not, check the network between the "
    "nodes.",
    "LeaseLost": "Raise `--lease-s` if heartbeats are lost under load.",
    "KvCorrupted": "Remove the node that the log names, then test its memory, GPU and network "
    "card.",
    "TransferTimeout": "The message names the node. Check the network, or `--transfer-deadline-s`.",
}
"""Remedies by the name of the class."""


def tree(
    root: type[KvrelayError] = KvrelayError, depth: int = 0
) -> Iterator[tuple[type[KvrelayError], int]]:
    yield root, depth
    for each in root.__subclasses__():
        if each.__module__ == kvrelay.wire.errors.__name__:
            yield from tree(each, depth + 1)


def error_pieces() -> dict[str, str]:
    """Return the tree as a table. Raises KeyError at an error that REMEDIES does not name."""
    return {
        "errors": table(
            ["Error", "Status", "`type`", "`code`", "Meaning", "What to do"],
            (_row(*each) for each in tree()),
        )
    }


def _row(each: type[KvrelayError], depth: int) -> list[str]:
    status = "exit code 2" if each is ConfigError else str(each.status)
    about = " ".join((each.__doc__ or "").split())
    name = "· " * depth + code(each.__name__)
    return [name, status, code(each.type), code(each.code or ""), about, REMEDIES[each.__name__]]
