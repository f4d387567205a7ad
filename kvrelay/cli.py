"""The program `kvrelay`, `kvrelay config`, and the answers to what is typed wrong.

A mistake is answered with one red line and exit code 2.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvrelay.commands import OF_ANOTHER, add_commands
from kvrelay.config_commands import (
    EXPLAINED,
    MODEL_ARGUMENT,
    SERVING,
    add_config_commands,
    given_settings,
    with_model,
)
from kvrelay.flag_names import answer_for
from kvrelay.help import ALL, GroupedCommand, GroupedCommands
from kvrelay.node.process import die_with_parent, exit_now
from kvrelay.settings import CPU, Setting, build, lines_in, merge, nearest
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError, KvrelayError
from kvrelay.wire.versions import RELEASE

__all__ = ["main", "run"]

# typer has its own copy of click since 0.29, and uses click's before
_UsageError: Any = typer.BadParameter.__mro__[1]
_DRAWN = {"up": ("cluster_secret", "admin_key", "node_api_key"), "router": ("admin_key",)}
"""Settings that a command draws at its start if they were not given."""
_COMMENT_AT = 40

app = typer.Typer(
    cls=GroupedCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="kvrelay: LLM serving with prefill and decode on different nodes.",
    context_settings={
        # --max_model_len is --max-model-len
        "token_normalize_func": lambda word: word.replace("_", "-"),
        "help_option_names": ["-h", "--help", ALL],
        "max_content_width": 100,
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvrelay {RELEASE}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...


def _config(
    ctx: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND [FLAGS]", help=f"One of {', '.join(SERVING)}, with its flags."
        ),
    ],
) -> int:
    """Print what would be in force for a command: each setting, its value, and its source.

    A source is a flag, a variable, a line of its --config file, or the default. Secrets are not
    shown. Nothing is started; the exit code is 2 if a value is wrong.
    """
    name, *words = command
    explained = EXPLAINED.get(name)
    if explained is None:
        raise ConfigError(
            f"config explains {', '.join(SERVING)}, not {name!r}{nearest(name, SERVING)}"
        )
    config, known = explained
    theirs: Any = ctx.find_root().command
    typed = theirs.commands[name].make_context(name, words, parent=ctx.find_root())
    given = dict(typed.params)
    file = given.pop("config")
    values = merge(known, given_settings(given), file)
    named = with_model(values) if "model" in known else values
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
    typer.echo("\n".join([f"# kvrelay {name}", *_explained(known, named, sources)]))
    return 0


def _explained(
    known: Mapping[str, Setting], values: Mapping[str, object], sources: Mapping[str, str]
) -> Iterator[str]:
    group = ""
    for name, setting in known.items():
        if setting.group != group:
            group = setting.group
            yield f"\n# {group} settings"
        value = values.get(name, setting.default)
        text = json.dumps("(not shown)") if setting.secret and value else _as_yaml(value)
        unset = "# " if value is None else ""  # a file cannot say that there is no value
        yield f"{f'{unset}{name}: {text}':{_COMMENT_AT}}  # {sources.get(name, 'default')}"


def _as_yaml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.dumps(value, ensure_ascii=False)


def _in_full(name: str) -> str:
    return {CPU.name: "device", MODEL_ARGUMENT: "model"}.get(name, name)


app.command("config", cls=GroupedCommand, context_settings=dict(OF_ANOTHER))(_config)
add_config_commands(app)
add_commands(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 if it was typed wrong, 1 if it failed.

    Ctrl-C is 130.
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
    flag = getattr(why, "option_name", None) or ""
    if len(flag) == 2:  # click takes -tp for -t and -p
        flag = next((word.rstrip("=.0123456789") for word in words if word.startswith(flag)), flag)
    answer = answer_for(flag) if flag else ""
    return f"unknown flag {flag}; {answer}" if answer else str(why.format_message())


def _fail(message: str, code: int) -> int:
    first, _, rest = message.partition("\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(first, style="red"))
    if rest:
        console.print(Text(rest))
    return code


def main() -> None:
    die_with_parent()
    exit_now(run())  # without a teardown, which would take another fifth of a second


if __name__ == "__main__":
    main()
