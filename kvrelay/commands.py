"""Commands that start no server; their docstrings are their help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cluster_plan import API_KEY, NODE_API_KEY
from kvrelay.help import GroupedCommand
from kvrelay.machine import embedded_model
from kvrelay.settings import build, merge, settings_of
from kvrelay.terminal import plain_console
from kvrelay.wire.config import CacheConfig, EngineConfig
from kvrelay.wire.config_checks import base_url
from kvrelay.wire.router_config import KeyConfig

__all__ = ["add_commands"]

_Node = Annotated[str, typer.Argument(metavar="NODE_URL", help="Address of the node.")]
_NodeKey = Annotated[str, typer.Option(help="Key of the node.", envvar=NODE_API_KEY)]
_Wait = Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


def add_commands(app: typer.Typer) -> None:
    for command in (_chat, _key, _drain, _plan, _replay, _role, _prefetch):
        app.command(command.__name__.strip("_"), cls=GroupedCommand)(command)


def _chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(help="API key of the server.", envvar=API_KEY)] = "",
    model: Annotated[
        str, typer.Option(help="Model or adapter to talk to. [default: the server's first]")
    ] = "",
) -> int:
    """Chat with a running cluster in the terminal, one question per line."""
    from kvrelay.chat import chat

    return chat(base_url(url), api_key, model)


def _key(name: Annotated[str, typer.Argument(help="Name of the key's owner.")]) -> int:
    """Generate an API key for the router, and print it once with the lines for its configuration."""
    from kvrelay.router.admission.keys import draw_key, hash_of

    key = draw_key()
    checked = KeyConfig(name, hash_of(key))
    typer.echo(f"{key}\n\n# for the router's --config file; add limits here\nkeys:")
    typer.echo(f'  - name: "{checked.name}"\n    sha256: "{checked.sha256}"')
    return 0


def _drain(
    node: _Node,
    node_api_key: _NodeKey = "",
    wait: _Wait = 600.0,
    undo: Annotated[bool, typer.Option("--undo", help="Accept requests again.")] = False,
) -> int:
    """Make a node accept nothing new, and wait until it is idle."""
    from kvrelay.node_commands import drain

    return drain(base_url(node), node_api_key, wait, undo=undo)


def _plan(
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")],
    card: Annotated[Path, typer.Option(help="Rate card of a node, from `kvrelay profile`.")],
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME|IN:OUT|TRACE",
            help="chat, code, summarise, long-context, reasoning; lengths in tokens; a trace; or "
            "agents, as --agents of `kvrelay bench` names them.",
        ),
    ],
    ttft_ms: Annotated[float, typer.Option(help="Target for the first token, in milliseconds.")],
    tpot_ms: Annotated[
        float,
        typer.Option(help="Target for the mean time per further token, in milliseconds."),
    ],
    rate: Annotated[
        float,
        typer.Option(
            min=0.0,
            show_default=False,
            help="Requests per second, or concurrent agent sessions. [default: find the most]",
        ),
    ] = 0.0,
    as_json: _AsJson = False,
) -> int:
    """Find how many prefill and decode nodes a workload needs: simulate all splits of some GPUs.

    The exit code is 0 if nine of ten requests keep both targets with the best split, else 1.
    """
    from kvrelay.load.measures import Targets
    from kvrelay.planner.rate_card import read_card
    from kvrelay.sizing import Wanted, workload_of
    from kvrelay.sizing import run as run_plan

    work = workload_of(workload)
    wanted = Wanted(gpus, read_card(card), work, Targets(ttft_ms, tpot_ms), rate)
    return run_plan(wanted, plain_console(), as_json=as_json)


def _replay(
    incident: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A router's log in JSON, or a trace (.jsonl, .gz) with prefixes."
        ),
    ],
    card: Annotated[Path, typer.Option(help="Rate card of the nodes, from `kvrelay profile`.")],
    nodes: Annotated[
        str,
        typer.Option(
            metavar="P:D", help="Prefill and decode nodes. [default: those in the log; 1:1]"
        ),
    ] = "",
    policy: Annotated[
        list[str], typer.Option(metavar="NAME", help="Policy by which the router chooses nodes.")
    ] = ["price"],  # noqa: B006
    kv_host_memory: Annotated[
        list[str], typer.Option(metavar="SIZE", help="For a trace: host memory of each node.")
    ] = ["0"],  # noqa: B006
    kv_store_size: Annotated[
        str, typer.Option(metavar="SIZE", help="For a trace: files below host memory.")
    ] = "",
    kv_pull: Annotated[str, typer.Option(help="For a trace: auto or never.")] = "auto",
) -> int:
    """Replay a router's log in the simulator, with other nodes or another policy.

    For a trace, show which prompt tokens were found, and why others were not. Give --policy and
    --kv-host-memory several times to compare.
    """
    from kvrelay.planner.rate_card import read_card
    from kvrelay.replay import run as run_replay

    # Where the files would be does not matter.
    sizes = {"kv_store_size": kv_store_size, "kv_store": "/"} if kv_store_size else {}
    tiers = [
        build(CacheConfig, merge(settings_of(CacheConfig), sizes | {"kv_host_memory": each}, None))
        for each in kv_host_memory
    ]
    console = plain_console()
    return run_replay(incident, read_card(card), nodes, policy, tiers, console, pull=kv_pull)


def _role(
    node: _Node,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    node_api_key: _NodeKey = "",
    wait: _Wait = 60.0,
) -> int:
    """Change the role of a running node, which finishes its requests and keeps weights and KV."""
    from kvrelay.node_commands import change_role

    return change_role(base_url(node), node_api_key, role, wait)


def _prefetch(
    model: Annotated[
        str,
        typer.Argument(
            help="A path or a Hub id, as --model takes it. [default: the embedded model]"
        ),
    ] = "",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the Hub.")] = "",
    load_format: Annotated[str, typer.Option(help="As for the node.")] = "auto",
    hf_token: Annotated[
        str, typer.Option(help="For gated models; else HF_TOKEN and stored logins.")
    ] = "",
    as_json: _AsJson = False,
) -> int:
    """Bring the files of a model to this machine, check that they are complete, and print their path.

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
