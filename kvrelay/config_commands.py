"""Commands whose flags are the settings of a config type: those that serve, profile, bench.

A server is imported by its own command alone: `kvrelay router` must not load torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvrelay.cluster_plan import (
    ADMIN_KEY,
    API_KEY,
    CLUSTER_SECRET,
    NODE_API_KEY,
    RUNTIME_LORA,
    ClusterConfig,
)
from kvrelay.compose import NOT_FOR_COMPOSE, ComposeConfig
from kvrelay.help import GroupedCommand
from kvrelay.load.config import BenchConfig
from kvrelay.machine import check_node_extra, check_port, embedded_model
from kvrelay.node.process import LOG_FORMAT, log_to_stderr, raise_file_limit
from kvrelay.settings import CPU, Setting, Values, build, merge, settings_of, without
from kvrelay.terminal import plain_console
from kvrelay.wire.config import NodeConfig, RanksConfig, Role
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig

__all__ = ["add_config_commands"]

_WithEngine = TypeVar("_WithEngine", NodeConfig, RanksConfig, ClusterConfig)
_TEXT_METAVARS = {
    "lora_modules": "NAME=PATH",
    "alias": "NAME=MODEL",
    "gpus": "IDS",
}
_METAVARS = {str: "TEXT", int: "INT", float: "NUMBER", tuple[str, ...]: "URL"}

_MODEL_ARGUMENT = "model_argument"
# Each node needs its own; and all their ranks run on this machine.
_CLUSTER_SKIP = ("kv_port", "tensor_parallel_address", "tensor_parallel_size_local")
_ENV = {
    "cluster_secret": CLUSTER_SECRET,
    "allow_runtime_lora": RUNTIME_LORA,
    "api_key": API_KEY,
    "node_api_key": NODE_API_KEY,
    "admin_key": ADMIN_KEY,
    "log_format": LOG_FORMAT,
}
_NODE_ENV = _ENV | {"api_key": NODE_API_KEY}


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileConfig:
    """A measurement of a node's steps."""

    node: NodeConfig = dataclasses.field(metadata=without("role"))
    out: str = "rate-card.json"
    """File for the rate card."""
    seconds: float = 0.0
    """Approximate duration, not counting engine start; 0 takes 120 on a GPU, 45 on a CPU."""


def _serve_node(role: Role, values: Values) -> int:
    config = build(NodeConfig, _for_engine(values) | {"role": role})
    check_port(config.host, config.port)
    if config.engine.tensor_parallel_size > 1 and config.engine.tensor_parallel_address:
        from kvrelay.paged_engine.rank_address import check_rank_0

        check_rank_0(config.engine.tensor_parallel_address)
    log_to_stderr(str(role), config.log_format)
    raise_file_limit()
    config = _with_model_here(config)
    from kvrelay.node.server import run as run_node

    return run_node(config)


def _serve_router(values: Values, again: Callable[[], Values] | None) -> int:
    config = _router_config(values)
    port = _check_router(config)
    log_to_stderr("router", config.log_format)
    raise_file_limit()
    if config.workers > 1:
        from kvrelay.workers import run_workers as run_router
    else:
        from kvrelay.router.server import run as run_router

    def settled(read: RouterConfig) -> RouterConfig:
        return dataclasses.replace(read, port=read.port or port)

    return run_router(
        settled(config), None if again is None else lambda: settled(_router_config(again()))
    )


def _check_router(config: RouterConfig) -> int:
    """Return its port. Raises ConfigError for what would end a router later."""
    port = check_port(config.host, config.port)
    if config.heartbeat_port:
        check_port(config.host, config.heartbeat_port, socket.SOCK_DGRAM)
    if config.kubernetes_selector:
        from kvrelay.router.membership.kubernetes_pods import api_server

        api_server(config.kubernetes_namespace)
    if config.ssl_certfile or config.ssl_ca_certs or config.node_ssl_certfile:
        from kvrelay.openai_api.tls import server_context
        from kvrelay.router.transport.node_client import node_tls

        server_context(config)
        node_tls(config)
    return port


def _router_config(values: Values) -> RouterConfig:
    config = build(RouterConfig, values)
    announced = config.heartbeat_port or config.kubernetes_selector
    if not (config.prefill and config.decode) and not announced:
        raise ConfigError(
            "a router needs at least one --prefill URL and one --decode URL, or --heartbeat-port "
            "for nodes that announce themselves, or --kubernetes-selector for pods"
        )
    return config


def _serve_ranks(values: Values) -> int:
    config = build(RanksConfig, _for_engine(values))
    from kvrelay.paged_engine.rank_address import interface_towards

    interface_towards(config.engine.tensor_parallel_address)
    log_to_stderr("ranks")
    raise_file_limit()
    config = _with_model_here(config)
    from kvrelay.node.ranks import run_ranks

    return run_ranks(config)


def _run_cluster(values: Values) -> int:
    # A cluster without a secret draws its own: no other node of this machine can join it.
    config = build(
        ClusterConfig, {"cluster_secret": secrets.token_urlsafe(32)} | _for_engine(values)
    )
    _check_router(config.router)
    log_to_stderr("up", config.router.log_format)
    raise_file_limit()
    config = _with_model_here(config)
    from kvrelay.cluster import up

    return up(config)


def _write_compose(values: Values) -> int:
    from kvrelay.compose import write

    return write(values, plain_console())


def _run_bench(values: Values) -> int:
    from kvrelay.bench import run as run_bench

    return run_bench(values, plain_console(width=None if sys.stdout.isatty() else 140))


def _run_profile(values: Values) -> int:
    from kvrelay.profile import run

    config = build(ProfileConfig, _for_engine(values))
    node = _with_model_here(config.node)
    console = plain_console()
    return run(node, Path(config.out), config.seconds, console)


def _for_engine(values: Values) -> Values:
    check_node_extra()
    return values if values.get("model") else values | {"model": str(embedded_model())}


def _with_model_here(config: _WithEngine) -> _WithEngine:
    from kvrelay.preflight import with_model_here

    return with_model_here(config)


def _add(
    app: typer.Typer,
    name: str,
    about: str,
    config: type,
    run: Callable[..., int],
    *,
    skip: Sequence[str] = (),
    env: Mapping[str, str] = _ENV,
    reloads: bool = False,
) -> None:
    # `env`: variables that stand in for flags. `reloads`: `run` also gets a way to reread its
    # settings, None without a config file.
    known = settings_of(config, skip)

    def command(**given: Any) -> int:
        file = given.pop("config")
        flags = _given_settings(given)

        def read() -> Values:
            return merge(known, flags, file)

        return run(read(), read if file else None) if reloads else run(read())

    parameters = [_flag(setting, env.get(setting.name)) for setting in known.values()]
    if "device" in known:
        model = typer.Argument(metavar="MODEL", help="The same as --model, as in vLLM.")
        parameters.insert(0, _parameter(_MODEL_ARGUMENT, str | None, model))
        parameters.append(_parameter("cpu", bool | None, typer.Option("--cpu", help=CPU.help)))
    file_option = typer.Option(
        "--config", metavar="FILE", help="YAML file with the same keys; flags win over it."
    )
    parameters.append(_parameter("config", str | None, file_option))
    command.__doc__ = about
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, cls=GroupedCommand)(command)


def _given_settings(typed: dict[str, Any]) -> Values:
    if (model := typed.pop(_MODEL_ARGUMENT, None)) is not None:
        if typed["model"] not in (None, model):
            raise ConfigError(
                f"two models are named, {model} and --model {typed['model']}; leave one of them "
                f"out (a flag takes one value)"
            )
        typed["model"] = model
    return {setting: None if value in ([], ()) else value for setting, value in typed.items()}


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=Annotated[kind, option])


def _flag(setting: Setting, env: str | None) -> inspect.Parameter:
    # Its value stays text: merge() converts it, as it does that of a file.
    flag: str = setting.flag
    kind: Any = list[str] if setting.several else str
    if setting.kind is bool:
        flag, kind = f"{flag}/{flag.replace('--', '--no-', 1)}", bool
    option = typer.Option(
        flag,
        help=setting.help,
        metavar=_metavar(setting),
        envvar=env,
        show_default=setting.shown or False,
        rich_help_panel=f"{setting.group} settings",
    )
    return _parameter(setting.name, kind | None, option)


def _metavar(setting: Setting) -> str | None:
    if setting.kind is bool:
        return None
    named = None if setting.kind in (int, float) else _TEXT_METAVARS.get(setting.name)
    return named or _METAVARS.get(setting.kind, "JSON")


def add_config_commands(app: typer.Typer) -> None:
    about = "Start a whole cluster on this machine and keep it alive."
    _add(app, "up", about, ClusterConfig, _run_cluster, skip=_CLUSTER_SKIP)
    about = "Write compose.yaml and .env for a whole cluster in containers on one host."
    skip = (*_CLUSTER_SKIP, *NOT_FOR_COMPOSE)
    _add(app, "compose", about, ComposeConfig, _write_compose, skip=skip, env={})
    about = "Serve a prefill node: it computes prompts and gives their KV away."
    _add_node(app, "prefill", about, Role.PREFILL, ("role",))
    about = "Serve a decode node: it takes KV and generates."
    _add_node(app, "decode", about, Role.DECODE, ("role",))
    about = "Serve one node alone, without a router."
    _add_node(app, "serve", about, Role.AGGREGATED, ("role", "router"))
    about = "Serve ranks of a tensor-parallel engine whose rank 0 is a node on another host."
    _add(app, "rank", about, RanksConfig, _serve_ranks)
    about = "Serve the OpenAI endpoint in front of prefill and decode nodes."
    _add(app, "router", about, RouterConfig, _serve_router, reloads=True)
    about = (
        "Measure how fast this machine computes prompts and decodes, and write a rate card.\n\n"
        "The exit code is 1 if the machine was too noisy to believe the times; the card is written "
        "all the same."
    )
    _add(app, "profile", about, ProfileConfig, _run_profile, env=_NODE_ENV)
    about = (
        "Measure any OpenAI endpoint under load: latency, throughput, goodput at targets, the "
        "highest rate that holds."
    )
    _add(app, "bench", about, BenchConfig, _run_bench)


def _add_node(app: typer.Typer, name: str, about: str, role: Role, skip: Sequence[str]) -> None:
    _add(app, name, about, NodeConfig, partial(_serve_node, role), skip=skip, env=_NODE_ENV)
