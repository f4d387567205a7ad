"""Commands that start no server: they ask running ones, look at this machine, or fetch files.

Their docstrings are their help. Each imports what it needs when it is called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from kvrelay.cluster_plan import ADMIN_KEY, API_KEY, NODE_API_KEY
from kvrelay.drawn_keys import stored_key
from kvrelay.help import GroupedCommand
from kvrelay.machine import embedded_model
from kvrelay.settings import build
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.config_checks import base_url, is_base_url, is_loopback
from kvrelay.wire.router_config import KeyConfig
from kvrelay.wire.versions import RELEASE

__all__ = ["OF_ANOTHER", "add_commands"]

OF_ANOTHER: Mapping[str, object] = MappingProxyType(
    {"ignore_unknown_options": True, "allow_interspersed_args": False}
)
"""Click's settings of a command whose arguments are another command and its flags."""

_ADMIN_KEY_HELP = (
    "The key that the router wants. [default: what our own router on this machine has drawn]"
)
_NODE_KEY_HELP = (
    "The key that the nodes want. [default: what `kvrelay up` of this machine has drawn]"
)
_ROUTER = "http://127.0.0.1:8000"
_Node = Annotated[str, typer.Argument(metavar="NODE_URL", help="The node, as the router knows it.")]
_AdminKey = Annotated[str, typer.Option(help=_ADMIN_KEY_HELP, envvar=ADMIN_KEY)]
_NodeKey = Annotated[str, typer.Option(help=_NODE_KEY_HELP, envvar=NODE_API_KEY)]
_Wait = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for it.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


def add_commands(app: typer.Typer) -> None:
    """Add all of them to the program."""
    for name, command in (
        ("chat", _chat),
        ("key", _key),
        ("doctor", _doctor),
        ("drain", _drain),
        ("plan", _plan),
        ("replay", _replay),
        ("role", _role),
        ("prefetch", _prefetch),
        ("version", _version),
    ):
        app.command(name, cls=GroupedCommand)(command)


def _chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(help="The key that it wants.", envvar=API_KEY)] = "",
    model: Annotated[
        str, typer.Option(help="Model or adapter to talk to. [default: the first that it serves]")
    ] = "",
    system: Annotated[str, typer.Option(help="System message of the conversation.")] = "",
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 is greedy. [default: the model's own]", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer. [default: the model's own]", show_default=False),
    ] = None,
) -> int:
    """Talk to a running cluster in the terminal. From a pipe: one question per line."""
    from kvrelay.chat import Endpoint, chat

    given = {"temperature": temperature, "max_tokens": max_tokens}
    sampling = {name: value for name, value in given.items() if value is not None}
    console = Console(highlight=False, soft_wrap=True)
    return chat(Endpoint(base_url(url), api_key), console, model, system, sampling)


def _key(name: Annotated[str, typer.Argument(help="Who will use it.")]) -> int:
    """Draw an API key for the router, and print it once with the lines for its configuration."""
    from kvrelay.router.admission.keys import draw_key, hash_of

    key = draw_key()
    checked = KeyConfig(name, hash_of(key))
    typer.echo(f"{key}\n\n# for the router's --config file; add limits here\nkeys:")
    typer.echo(f'  - name: "{checked.name}"\n    sha256: "{checked.sha256}"')
    return 0


def _doctor(
    router: Annotated[
        str,
        typer.Option(help="The router, which names the nodes. [default: http://127.0.0.1:8000]"),
    ] = "",
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Prefill nodes, instead of a router.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Decode nodes, instead of a router.")
    ] = None,
    node_api_key: _NodeKey = "",
    as_json: _AsJson = False,
) -> int:
    """Probe each pair of nodes of a running cluster: do they hand KV over, how, and how fast?"""
    from kvrelay.doctor import examine

    router = _address(router)
    node_api_key = node_api_key or _drawn_node_key(router, [*(prefill or []), *(decode or [])])
    return examine(router, prefill or [], decode or [], node_api_key, as_json=as_json)


def _drain(
    node: _Node,
    router: Annotated[
        str,
        typer.Option(
            help="A router to ask; without one the node is asked, and all routers see it."
        ),
    ] = "",
    admin_key: _AdminKey = "",
    node_api_key: _NodeKey = "",
    wait: _Wait = 600.0,
    undo: Annotated[bool, typer.Option("--undo", help="Have it take requests again.")] = False,
) -> int:
    """Have a node take nothing new, and wait until it has ended all that it has."""
    from kvrelay.node_commands import drain

    console = Console(highlight=False, soft_wrap=True)
    node, router = _address(node), _address(router)
    key = _key_for(node, router, admin_key, node_api_key)
    return drain(node, router, key, wait, console, undo=undo)


def _address(typed: str) -> str:
    return base_url(typed) if typed else ""


def _key_for(node: str, router: str, admin_key: str, node_api_key: str) -> str:
    if router:
        return admin_key or stored_key("admin", router)
    return node_api_key or _drawn_node_key("", [node])


def _drawn_node_key(router: str, nodes: Sequence[str]) -> str:
    here = all(is_base_url(node) and is_loopback(urlsplit(node).hostname or "") for node in nodes)
    return stored_key("nodes", router or _ROUTER) if here else ""


def _plan(
    gpus: Annotated[int, typer.Option(help="How many there are.")],
    card: Annotated[
        list[Path],
        typer.Option(
            help="A rate card of `kvrelay profile`; one for each size of a node, if there are "
            "several."
        ),
    ],
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME|IN:OUT|TRACE",
            help="chat, code, summarise ...; lengths in tokens; or a file.",
        ),
    ],
    ttft_ms: Annotated[
        float, typer.Option(help="The first token should be there within, in milliseconds.")
    ],
    tpot_ms: Annotated[
        float,
        typer.Option(help="Each further token should take no longer, on average of an answer."),
    ],
    rate: Annotated[
        float,
        typer.Option(
            min=0.0, help="Requests a second that there will be. [default: as many as can be]"
        ),
    ] = 0.0,
    as_json: _AsJson = False,
) -> int:
    """Find how many prefill and decode nodes a workload needs: simulate all splits of some GPUs.

    The exit code is 0 if nine of ten requests keep both targets with the best split, else 1.
    """
    from kvrelay.planner.setting import Targets
    from kvrelay.sizing import Wanted, read_cards, workload_of
    from kvrelay.sizing import run as run_plan

    wanted = Wanted(gpus, read_cards(card), workload_of(workload), Targets(ttft_ms, tpot_ms), rate)
    return run_plan(wanted, Console(highlight=False, soft_wrap=True), as_json=as_json)


def _replay(
    incident: Annotated[
        Path, typer.Argument(metavar="FILE", help="A router's log in JSON, or a recorded incident.")
    ],
    card: Annotated[Path, typer.Option(help="The rate card of the nodes, of `kvrelay profile`.")],
    nodes: Annotated[
        str, typer.Option(metavar="P:D", help="Prefill and decode nodes. [default: as there were]")
    ] = "",
    policy: Annotated[str, typer.Option(help="By which the router chooses nodes.")] = "price",
    record: Annotated[
        Path | None, typer.Option(help="Write the incident there, to be edited and replayed.")
    ] = None,
) -> int:
    """Replay what a router has logged in the simulator, with other nodes or another policy."""
    from kvrelay.planner.rate_card import read_card
    from kvrelay.replay import run as run_replay

    return run_replay(
        incident, read_card(card), nodes, policy, record, Console(highlight=False, soft_wrap=True)
    )


def _role(
    node: _Node,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    router: Annotated[
        str,
        typer.Option(
            help="A router to ask, which keeps the last node of a role; without one the node is "
            "asked."
        ),
    ] = "",
    admin_key: _AdminKey = "",
    node_api_key: _NodeKey = "",
    wait: _Wait = 60.0,
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is the last node of its role.")
    ] = False,
) -> int:
    """Change a running node's role; it ends what it has, and keeps its weights and its KV."""
    from kvrelay.node_commands import change_role

    console = Console(highlight=False, soft_wrap=True)
    node, router = _address(node), _address(router)
    key = _key_for(node, router, admin_key, node_api_key)
    return change_role(node, router, key, role, wait, console, force=force)


def _prefetch(
    model: Annotated[
        str,
        typer.Argument(
            help="A path or a Hub id, as --model takes it. [default: the embedded model]"
        ),
    ] = "",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the Hub.")] = "",
    load_format: Annotated[str, typer.Option(help="As the node will be given it.")] = "auto",
    hf_token: Annotated[
        str, typer.Option(help="For gated models; else HF_TOKEN and stored logins.")
    ] = "",
    as_json: _AsJson = False,
) -> int:
    """Bring the files of a model to this machine, check that they are whole, and print their path.

    The exit code is 0 if all is there, 1 if another try may help, 2 if no node would serve it.
    """
    from kvrelay.paged_engine.hub import prefetch

    given = {"load_format": load_format, "revision": revision, "hf_token": hf_token}
    config = build(EngineConfig, {"model": model or str(embedded_model()), **given})
    found = prefetch(config)
    count = len(found["files"])
    size = f"{found['bytes'] / 1e6:.1f} MB in {count} file{'s' if count > 1 else ''}"
    typer.echo(json.dumps(found) if as_json else f"{found['path']}\n{size}")
    return 0


def _version(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="And of all that matters beside it.")
    ] = False,
    as_json: _AsJson = False,
) -> int:
    """Print the version; with --verbose also those of Python, torch, CUDA, driver and protocols."""
    found: dict[str, str | None] = {"kvrelay": RELEASE}
    if verbose:
        from kvrelay.machine import installed

        found = installed()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        width = max(map(len, found))
        for name, value in found.items():
            typer.echo(f"{name:{width}}  {'not installed' if value is None else value}")
    return 0
