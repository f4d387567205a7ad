"""The command `kvrelay`: one function per command, flags made from the config types.

Owns what is typed and what is answered when it is wrong (one red line, exit code 2). Imports a
server only inside its command: `kvrelay router` must not import torch, and `kvrelay --help` must
not wait for anything.
"""

from __future__ import annotations

import dataclasses
import inspect
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from kvrelay.cluster_plan import (
    ADMIN_KEY,
    API_KEY,
    CLUSTER_SECRET,
    NODE_API_KEY,
    RUNTIME_LORA,
    ClusterConfig,
)
from kvrelay.commands import OF_ANOTHER, add_commands
from kvrelay.compose import NOT_FOR_COMPOSE, ComposeConfig
from kvrelay.embedded import embedded_model
from kvrelay.flag_names import SERVER
from kvrelay.help import ALL, GroupedCommand, GroupedCommands
from kvrelay.in_force import lines_of
from kvrelay.load.config import BenchConfig
from kvrelay.machine import check_port
from kvrelay.node.process import (
    LOG_FORMAT,
    die_with_parent,
    exit_now,
    log_to_stderr,
    raise_file_limit,
)
from kvrelay.settings import CPU, Setting, build, lines_in, merge, nearest, settings_of
from kvrelay.wire.config import NodeConfig, RanksConfig, Role, TransferConfig
from kvrelay.wire.config_checks import base_url
from kvrelay.wire.errors import ConfigError, KvrelayError
from kvrelay.wire.kv_events_config import address_of
from kvrelay.wire.router_config import RouterConfig

__all__ = ["main", "run"]

_WithEngine = TypeVar("_WithEngine", NodeConfig, RanksConfig, ClusterConfig)
_TEXT_METAVARS = {
    "lora_modules": "NAME=PATH",
    "alias": "NAME=MODEL",
    "node_allow": "HOST",
    "vllm_kv_events": "[URL=]EVENTS:REPLAY",
    "gpus": "IDS",
}
_METAVARS = {str: "TEXT", int: "INT", float: "NUMBER", tuple[str, ...]: "URL"}
_UsageError: Any = typer.BadParameter.__mro__[
    1
]  # typer has its own copy of click since 0.29, and uses click's before

# What `kvrelay config` explains: config type and settings of commands that serve.
_EXPLAINED: dict[str, tuple[type, dict[str, Setting]] | None] = dict.fromkeys(
    ("up", "serve", "prefill", "decode", "router", "rank")
)
_DRAWN = {"up": ("cluster_secret", "admin_key", "node_api_key"), "router": ("admin_key",)}
"""What they draw at their start if it was not given."""

app = typer.Typer(
    cls=GroupedCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="kvrelay: LLM serving with prefill and decode on different nodes.",
    # --max_model_len is --max-model-len.
    context_settings={
        "token_normalize_func": lambda word: word.replace("_", "-"),
        "help_option_names": ["-h", "--help", ALL],
        "max_content_width": 100,
    },
)


def _serving_node(role: Role) -> Callable[[dict[str, object]], int]:
    def serve(values: dict[str, object]) -> int:
        config = build(NodeConfig, _named(values) | {"role": role})
        check_port(config.host, config.port)
        _check_further_ports(config)
        if config.engine.tensor_parallel_size > 1 and config.engine.tensor_parallel_address:
            from kvrelay.paged_engine.rank_address import check_rank_0

            check_rank_0(config.engine.tensor_parallel_address)
        log_to_stderr(str(role), config.log_format)
        raise_file_limit()
        config = _with_model_here(config)
        from kvrelay.node.server import run as run_node

        return run_node(config)

    return serve


def _check_further_ports(config: NodeConfig) -> None:
    if config.transfer.kv_port:
        check_port(
            config.transfer.kv_host, config.transfer.kv_port, setting="--kv-host or --kv-port"
        )
    if (told := config.told_events) is None:
        return
    for name, endpoint in (("endpoint", told.endpoint), ("replay_endpoint", told.replay_endpoint)):
        if endpoint and address_of(endpoint)[1]:
            check_port(*address_of(endpoint), setting=f"{name} of --kv-events-config")


def _serving_router(
    values: dict[str, object], again: Callable[[], dict[str, object]] | None
) -> int:
    config = _router_config(values)
    from kvrelay.drawn_keys import drawn_key

    port = _check_router(config)
    log_to_stderr("router", config.log_format)
    raise_file_limit()
    if config.workers > 1:
        from kvrelay.workers import run_workers as run_router
    else:
        from kvrelay.router.server import run as run_router
    with nullcontext("") if config.admin_key else drawn_key("admin", port) as drawn:

        def settled(read: RouterConfig) -> RouterConfig:
            return dataclasses.replace(
                read, port=read.port or port, admin_key=read.admin_key or drawn
            )

        return run_router(
            settled(config), None if again is None else lambda: settled(_router_config(again()))
        )


def _check_router(config: RouterConfig) -> int:
    """Return its port. Raises ConfigError for what would end a router later."""
    port = check_port(config.host, config.port)
    if config.heartbeat_port:
        check_port(config.host, config.heartbeat_port, socket.SOCK_DGRAM)
    if config.kubernetes_selector:
        from kvrelay.router.membership.kubernetes_pods import kubernetes_client

        kubernetes_client(config.kubernetes_namespace)
    if config.p2p_nccl_port:
        check_port(config.host, config.p2p_nccl_port)
    if config.ssl_certfile or config.ssl_ca_certs or config.node_ssl_certfile:
        from kvrelay.openai_api.tls import server_context
        from kvrelay.router.transport.node_client import node_tls

        server_context(config)
        node_tls(config)
    return port


def _router_config(values: Mapping[str, object]) -> RouterConfig:
    config = build(RouterConfig, values)
    announced = config.heartbeat_port or config.p2p_nccl_port or config.kubernetes_selector
    if not (config.prefill and config.decode) and not announced:
        raise ConfigError(
            "a router needs at least one --prefill URL and one --decode URL, or --heartbeat-port "
            "for nodes that "
            "announce themselves, or --kubernetes-selector for pods"
        )
    return config


def _serving_ranks(values: dict[str, object]) -> int:
    config = build(RanksConfig, _named(values))
    from kvrelay.paged_engine.rank_address import interface_towards

    interface_towards(config.engine.tensor_parallel_address)
    log_to_stderr("ranks")
    raise_file_limit()
    config = _with_model_here(config)
    from kvrelay.node.ranks import run_ranks

    return run_ranks(config)


def _running_cluster(values: dict[str, object]) -> int:
    # A cluster that nobody gave a secret draws its own: no other node of this machine can join it.
    config = build(ClusterConfig, {"cluster_secret": secrets.token_urlsafe(32)} | _named(values))
    _check_router(config.router)
    log_to_stderr("up", config.router.log_format)
    raise_file_limit()
    config = _with_model_here(config)
    from kvrelay.cluster import up

    return up(config)


def _writing_compose(values: dict[str, object]) -> int:
    from kvrelay.compose_files import write

    return write(values, Console(highlight=False, soft_wrap=True))


def _running_batch(values: dict[str, object]) -> int:
    from kvrelay.batch import over_http, read_batch, run_batch, with_engine
    from kvrelay.chat import Endpoint

    url, key, at_once, source, target = (
        values.pop(name) for name in ("url", "key", "concurrency", "source", "target")
    )
    files, console = (Path(str(source)), Path(str(target))), Console(stderr=True, highlight=False)
    if url:
        if values:
            flag = "--" + next(iter(values)).replace("_", "-")
            raise ConfigError(
                f"--url names a running server and {flag} an engine to start; leave one of them out"
            )
        endpoint = Endpoint(base_url(str(url)), str(key))
        return run_batch(*files, lambda: over_http(endpoint), int(str(at_once)), console)
    read_batch(files[0])  # before a model is loaded for nothing
    config = _with_model_here(build(NodeConfig, _named(values) | {"role": Role.AGGREGATED}))
    return run_batch(*files, lambda: with_engine(config), int(str(at_once)), console)


def _running_bench(values: dict[str, object]) -> int:
    from kvrelay.bench import run as run_bench

    return run_bench(
        values, Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    )


def _profiling(values: dict[str, object]) -> int:
    from kvrelay.profile import asked_of, run

    asked = asked_of(values)
    config = _with_model_here(build(NodeConfig, _named(values) | {"role": Role.AGGREGATED}))
    return run(config, asked, Console(highlight=False, soft_wrap=True))


def _named(values: dict[str, object]) -> dict[str, object]:
    return values if values.get("model") else values | {"model": str(embedded_model())}


def _with_model_here(config: _WithEngine) -> _WithEngine:
    from kvrelay.before_start import with_model_here

    return with_model_here(config)


def _add(
    name: str,
    about: str,
    config: type,
    serve: Callable[..., int],
    skip: Sequence[str],
    env: Mapping[str, str],
    own: Sequence[inspect.Parameter] = (),
    *,
    reloads: bool = False,
) -> None:
    known = settings_of(config, skip)
    if name in _EXPLAINED:
        _EXPLAINED[name] = config, known

    def command(**given: Any) -> int:
        mine = {
            parameter.name: given.pop(parameter.name)
            for parameter in own
            if parameter is not _MODEL
        }
        file = given.pop("config")
        flags = _flags(given)

        def read() -> dict[str, object]:
            return merge(known, flags, file) | mine

        return serve(read(), read if file else None) if reloads else serve(read())

    own = (*own, _MODEL) if name in _MODEL_NAMED_FIRST else own
    parameters = [*own, *(_parameter(setting, env.get(setting.name)) for setting in known.values())]
    if "device" in known:
        parameters.append(_typed("cpu", bool | None, None, typer.Option("--cpu", help=CPU.help)))
    file_option = typer.Option(
        "--config", metavar="FILE", help="YAML file with the same keys; flags win over it."
    )
    parameters.append(_typed("config", str | None, None, file_option))
    command.__doc__ = about
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, cls=GroupedCommand)(command)


def _flags(given: dict[str, Any]) -> dict[str, object]:
    if (model := given.pop(_MODEL_ARGUMENT, None)) is not None:
        if given["model"] not in (None, model):
            raise ConfigError(
                f"two models are named, {model} and --model {given['model']}; leave one of them "
                f"out "
                "(a flag takes one value)"
            )
        given["model"] = model
    return {setting: None if value in ([], ()) else value for setting, value in given.items()}


def _typed(name: str, kind: Any, default: object, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _parameter(setting: Setting, env: str | None) -> inspect.Parameter:
    flag = (
        f"{setting.flag}/{setting.flag.replace('--', '--no-', 1)}"
        if setting.kind is bool
        else setting.flag
    )
    kind = bool if setting.kind is bool else list[str] if setting.several else str
    option = typer.Option(
        flag,
        help=setting.help,
        metavar=_metavar(setting),
        envvar=env,
        show_default=_shown(setting),
        rich_help_panel=f"{setting.group} settings",
    )
    return _typed(setting.name, kind | None, None, option)


def _metavar(setting: Setting) -> str | None:
    if setting.kind is bool:
        return None
    named = None if setting.kind in (int, float) else _TEXT_METAVARS.get(setting.name)
    return named or _METAVARS.get(setting.kind, "JSON")


def _shown(setting: Setting) -> str | bool:
    if setting.name == "model" and setting.default is dataclasses.MISSING:
        return "the embedded model"
    if setting.default in (dataclasses.MISSING, None, "", ()):
        return False
    return (
        {True: "on", False: "off"}[setting.default]
        if isinstance(setting.default, bool)
        else str(setting.default)
    )


_MODEL_ARGUMENT = "model_argument"
_MODEL = _typed(
    _MODEL_ARGUMENT,
    str | None,
    None,
    typer.Argument(metavar="MODEL", help="The same as --model, as in vLLM."),
)
_MODEL_NAMED_FIRST = ("up", "serve", "prefill", "decode", "rank", "compose", "profile")

# Each node needs its own; and all their ranks run on this machine.
_CLUSTER_SKIP = ("kv_port", "tensor_parallel_address", "tensor_parallel_size_local")
_add(
    "up",
    "Start a whole cluster on this machine and keep it alive.",
    ClusterConfig,
    _running_cluster,
    _CLUSTER_SKIP,
    {
        "api_key": API_KEY,
        "admin_key": ADMIN_KEY,
        "node_api_key": NODE_API_KEY,
        "cluster_secret": CLUSTER_SECRET,
        "allow_runtime_lora": RUNTIME_LORA,
        "log_format": LOG_FORMAT,
    },
)
_add(
    "compose",
    "Write compose.yaml and .env for a whole cluster in containers on one host.",
    ComposeConfig,
    _writing_compose,
    (*_CLUSTER_SKIP, *NOT_FOR_COMPOSE),
    {},
    (_typed("output", str, ".", typer.Option(metavar="FOLDER", help="Where the files go.")),),
)
for _role, _name, _about in (
    (Role.PREFILL, "prefill", "Serve a prefill node: it computes prompts and gives their KV away."),
    (Role.DECODE, "decode", "Serve a decode node: it takes KV and generates."),
    (Role.AGGREGATED, "serve", "Serve one node alone, without a router."),
):
    _add(
        _name,
        _about,
        NodeConfig,
        _serving_node(_role),
        ("role", "router") if _role is Role.AGGREGATED else ("role",),
        {
            "api_key": NODE_API_KEY,
            "cluster_secret": CLUSTER_SECRET,
            "allow_runtime_lora": RUNTIME_LORA,
            "log_format": LOG_FORMAT,
        },
    )
_add(
    "rank",
    "Serve ranks of a tensor-parallel engine whose rank 0 is a node on another host.",
    RanksConfig,
    _serving_ranks,
    (),
    {"allow_runtime_lora": RUNTIME_LORA},
)
_add(
    "router",
    "Serve the OpenAI endpoint in front of prefill and decode nodes.",
    RouterConfig,
    _serving_router,
    (),
    {
        "api_key": API_KEY,
        "node_api_key": NODE_API_KEY,
        "admin_key": ADMIN_KEY,
        "log_format": LOG_FORMAT,
    },
    reloads=True,
)

_add(
    "batch",
    "Answer a file of requests (OpenAI's batch format), by a running server or by an engine "
    "started for it.",
    NodeConfig,
    _running_batch,
    (
        "role",
        "router",
        "host",
        "port",
        "api_key",
        "max_body_bytes",
        "kv_events_config",
        "profiler_config",
        *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"),
        *(
            "root_path",
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
            "allow_credentials",
        ),
        "log_format",
        "otlp_traces_endpoint",
        *settings_of(TransferConfig),
    ),
    {},
    (
        _typed(
            "source",
            str,
            inspect.Parameter.empty,
            typer.Argument(metavar="IN", help="The requests, one per line."),
        ),
        _typed(
            "target",
            str,
            inspect.Parameter.empty,
            typer.Argument(metavar="OUT", help="Their answers, in any order."),
        ),
        _typed(
            "url", str, "", typer.Option(help="A running server; without it an engine is started.")
        ),
        _typed(
            "key", str, "", typer.Option("--api-key", help="The key that it wants.", envvar=API_KEY)
        ),
        _typed("concurrency", int, 64, typer.Option(help="Requests that are under way at once.")),
    ),
)
_add(
    "profile",
    "Measure how fast this machine computes prompts, decodes and moves KV, and write a rate "
    "card.\n\n"
    "The exit code is 1 if the machine was too noisy to believe the times; the card is written "
    "all the same.",
    NodeConfig,
    _profiling,
    ("role",),
    {"cluster_secret": CLUSTER_SECRET, "allow_runtime_lora": RUNTIME_LORA},
    (
        _typed(
            "out",
            str,
            "",
            typer.Option(metavar="FILE", help="The rate card. [default: rate-card.json]"),
        ),
        _typed(
            "seconds",
            float,
            0.0,
            typer.Option(
                help="About how long, beside the start of the engine; 0: 120 on a GPU, 45 on a CPU."
            ),
        ),
        _typed(
            "decode",
            list[str] | None,
            None,
            typer.Option(
                metavar="REQUESTSxCONTEXT", help="Measure this step, and no card. Again for more."
            ),
        ),
        _typed(
            "prefill",
            list[str] | None,
            None,
            typer.Option(
                metavar="TOKENS[+CONTEXT]", help="Measure this step, and no card. Again for more."
            ),
        ),
    ),
)


_add(
    "bench",
    "Measure any OpenAI endpoint under load: latency, throughput, goodput at targets, the highest "
    "rate that holds.",
    BenchConfig,
    _running_bench,
    (),
    {"api_key": API_KEY},
    (
        _typed(
            "files",
            list[str] | None,
            None,
            typer.Argument(metavar="[RESULT]...", help="With --compare."),
        ),
        _typed(
            "compare",
            bool,
            False,
            typer.Option("--compare", help="Measure nothing; show results side by side."),
        ),
    ),
)


def _config(
    ctx: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND [FLAGS]", help=f"One of {', '.join(_EXPLAINED)}, with its flags."
        ),
    ],
) -> int:
    """Print what would be in force for a command and why: each setting, its value, and where that
    comes from.

    That is a flag, a variable, a line of its --config file, or the default. Secrets are not shown.
    Starts nothing; the exit code is 2, as the command's own, if a value is wrong.
    """
    name, *words = command
    explained = _EXPLAINED.get(name)
    if explained is None:
        raise ConfigError(
            f"config explains {', '.join(_EXPLAINED)}, not {name!r}{nearest(name, _EXPLAINED)}"
        )
    config, known = explained
    theirs: Any = ctx.find_root().command
    typed = theirs.commands[name].make_context(name, words, parent=ctx.find_root())
    given = dict(typed.params)
    file = given.pop("config")
    values = merge(known, _flags(given), file)
    named = _named(values) if "model" in known else values
    build(config, named | ({"role": Role(name)} if name in list(Role) else {}))
    sources = dict.fromkeys(_DRAWN.get(name, ()), "drawn at each start")
    sources |= {
        _in_full(key): f"{file}:{line}" for key, line in (lines_in(file) if file else {}).items()
    }
    for param in typed.command.params:
        source = typed.get_parameter_source(param.name)
        if source is not None and source.name != "DEFAULT":
            flag = param.secondary_opts[0] if typed.params[param.name] is False else param.opts[0]
            said = f"flag {flag}" if flag.startswith("-") else "argument"
            sources[_in_full(param.name)] = (
                str(param.envvar) if source.name == "ENVIRONMENT" else said
            )
    typer.echo("\n".join([f"# kvrelay {name}", *lines_of(known, named, sources)]))
    return 0


def _in_full(name: str) -> str:
    return {CPU.name: "device", _MODEL_ARGUMENT: "model"}.get(name, name)


app.command("config", cls=GroupedCommand, context_settings=dict(OF_ANOTHER))(_config)
add_commands(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 2 if what was typed is wrong, 1 if it failed, 130
    after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return int(app(args=words, prog_name="kvrelay", standalone_mode=False) or 0)
    except _UsageError as why:
        message = _usage(why, words)  # empty if no command was named: then typer has shown the help
        return _fail(message, 2) if message else 2
    except ConfigError as why:
        return _fail(why.message, why.exit_code)
    except KvrelayError as why:
        return _fail(why.message, 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except typer.Exit as why:
        return why.exit_code


def _usage(why: Any, words: Sequence[str]) -> str:
    message = why.format_message()
    flag = getattr(why, "option_name", None)
    if flag is not None and message.startswith("No such option"):
        known = (
            [name for each in why.ctx.command.params for name in (*each.opts, *each.secondary_opts)]
            if why.ctx
            else []
        )
        if len(flag) == 2:  # click takes -tp for -t and -p
            flag = next(
                (word.rstrip("=.0123456789") for word in words if word.startswith(flag)), flag
            )
        if SERVER.get(flag) in known:
            return f"unknown flag {flag}; here it is {SERVER[flag]}"
        return f"unknown flag {flag}{_of_others(flag) or nearest(flag, known)}"
    if "unexpected extra argument" in message and why.ctx:
        extra = str(message).rpartition(" (")[2].rstrip(").").split(" ")[0]
        before = words[: words.index(extra)] if extra in words else []
        named = next(
            (word for word in reversed(before) if word.startswith("--") and "=" not in word), ""
        )
        again = any(
            named in each.opts and getattr(each, "multiple", False)
            for each in why.ctx.command.params
        )
        hint = (
            f": {named} takes one value{'; give it again for each further one' if again else ''}"
            if named
            else ""
        )
        return f"{str(message).rstrip('.')}{hint}"
    return str(message)


def _of_others(flag: str) -> str:
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    others = [
        f"`kvrelay {command}`" for command, each in _EXPLAINED.items() if each and name in each[1]
    ]
    return f"; it is of {', '.join(others)}" if others else ""


def _fail(message: str, code: int) -> int:
    first, _, rest = message.partition("\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(first, style="red"))
    if rest:
        console.print(Text(rest))
    return code


def main() -> None:
    """The console script."""
    die_with_parent()
    exit_now(run())  # teardown would take another fifth of a second


if __name__ == "__main__":
    main()
