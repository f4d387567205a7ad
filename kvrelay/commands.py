"""Commands that start no server: they ask running ones, look at this machine, or fetch files for later.

Owns what is typed and printed; each imports what it needs when it is called. What starts a server is in cli.py.
"""

from __future__ import annotations

import json
import logging
from typing import Annotated

import typer
from rich.console import Console

from kvrelay.embedded import embedded_model
from kvrelay.plan import ADMIN_KEY, API_KEY, NODE_API_KEY
from wire.config import EngineConfig
from wire.key_config import KeyConfig
from wire.versions import RELEASE

__all__ = ["add_commands"]

_AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


def add_commands(app: typer.Typer) -> None:
    """Add them all."""
    for name, command in (
        ("chat", _chat),
        ("key", _key),
        ("doctor", _doctor),
        ("drain", _drain),
        ("prefetch", _prefetch),
        ("version", _version),
    ):
        app.command(name)(command)
    # Its flags are the other command's.
    theirs = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}
    app.command("supervise", context_settings=theirs)(_supervise)


def _chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(help="The key that it wants.", envvar=API_KEY)] = "",
) -> int:
    """Talk to a running cluster in the terminal. From a pipe: one question per line."""
    from kvrelay.chat import Endpoint, chat

    return chat(Endpoint(url.rstrip("/").removesuffix("/v1"), api_key), Console(highlight=False, soft_wrap=True))


def _key(name: Annotated[str, typer.Argument(help="Who will use it.")]) -> int:
    """Draw an API key for the router, and print it once with what its configuration needs of it: not the key."""
    from router.admission.keys import draw_key, hash_of

    key = draw_key()
    checked = KeyConfig(name, hash_of(key))
    typer.echo(f"{key}\n\n# for the router's --config file; add limits here\nkeys:")
    typer.echo(f'  - name: "{checked.name}"\n    sha256: "{checked.sha256}"')
    return 0


def _doctor(
    router: Annotated[
        str, typer.Option(help="The router, which names the nodes. [default: http://127.0.0.1:8000]")
    ] = "",
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Prefill nodes, instead of a router.")
    ] = None,
    decode: Annotated[list[str] | None, typer.Option(metavar="URL", help="Decode nodes, instead of a router.")] = None,
    node_api_key: Annotated[str, typer.Option(help="The key that the nodes want.", envvar=NODE_API_KEY)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Hand a few KV blocks over between each two nodes of a running cluster: does it work, how, and how fast?"""
    from kvrelay.doctor import run as run_doctor

    return run_doctor(router, prefill or [], decode or [], node_api_key, as_json=as_json)


def _drain(
    node: Annotated[str, typer.Argument(metavar="NODE_URL", help="The node, as the router knows it.")],
    router: Annotated[
        str, typer.Option(help="A router to ask; without one the node is asked, and all routers see it.")
    ] = "",
    admin_key: Annotated[str, typer.Option(help="The key that the router wants.", envvar=ADMIN_KEY)] = "",
    node_api_key: Annotated[str, typer.Option(help="The key that the node wants.", envvar=NODE_API_KEY)] = "",
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for it.")] = 600.0,
    undo: Annotated[bool, typer.Option("--undo", help="Have it take requests again.")] = False,
) -> int:
    """Have a node take nothing new, and wait until all that it has is done: then it can be stopped at no cost."""
    from kvrelay.drain import run as run_drain

    console = Console(highlight=False, soft_wrap=True)
    return run_drain(node, router, admin_key, node_api_key, wait, console, undo=undo)


def _supervise(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND [FLAGS]", help="One that serves, with its flags."),
    ],
) -> int:
    """Keep one command running: start it again when it fails, as a node does whose GPU has failed.

    It waits longer each time, from 0.5 up to 30 s. It ends with the command's exit code when that ends with 0, is told
    to end, or was typed wrongly (2).
    """
    from kvrelay.supervise import supervise

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return supervise(command)


def _prefetch(
    model: Annotated[
        str, typer.Argument(help="A path or a Hub id, as --model takes it. [default: the embedded model]")
    ] = "",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the Hub.")] = "",
    load_format: Annotated[str, typer.Option(help="As the node will be given it.")] = "auto",
    hub_token: Annotated[str, typer.Option(help="For gated models; else HF_TOKEN and stored logins.")] = "",
    as_json: _AsJson = False,
) -> int:
    """Bring the files of a model to this machine and check that they are whole. Prints their path and size.

    The exit code is 0 if all is there, 1 if another try may help, 2 if no node would serve it.
    """
    from paged_engine.prefetch import prefetch

    config = EngineConfig(
        model or str(embedded_model()), load_format=load_format, revision=revision, hub_token=hub_token
    )
    found = prefetch(config)
    count = len(found["files"])
    size = f"{found['bytes'] / 1e6:.1f} MB in {count} file{'s' if count > 1 else ''}"
    typer.echo(json.dumps(found) if as_json else f"{found['path']}\n{size}")
    return 0


def _version(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="And of all that matters beside it.")] = False,
    as_json: _AsJson = False,
) -> int:
    """Print the version; with --verbose also of Python, torch, CUDA, the driver, the connectors and the protocols."""
    found: dict[str, str | None] = {"kvrelay": RELEASE}
    if verbose:
        from kvrelay.installed import installed

        found = installed()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        width = max(map(len, found))
        for name, value in found.items():
            typer.echo(f"{name:{width}}  {'not installed' if value is None else value}")
    return 0
