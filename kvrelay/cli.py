"""The program `kvrelay`, and the answers to what is typed wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from kvrelay.commands import add_commands
from kvrelay.config_commands import add_config_commands
from kvrelay.flag_names import answer_for
from kvrelay.help import ALL, GroupedCommands
from kvrelay.node.process import die_with_parent, exit_now
from kvrelay.terminal import plain_console
from kvrelay.wire.errors import ConfigError, KvrelayError
from kvrelay.wire.versions import RELEASE

__all__ = ["main", "run"]

# typer has its own copy of click since 0.29, and uses click's before
_UsageError: Any = typer.BadParameter.__mro__[1]

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


add_config_commands(app)
add_commands(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 if it was typed wrong, 1 if it failed."""
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
    console = plain_console(stderr=True)
    console.print(Text(first, style="red"))
    if rest:
        console.print(Text(rest))
    return code


def main() -> None:
    die_with_parent()
    exit_now(run())  # without a teardown, which would take another fifth of a second


if __name__ == "__main__":
    main()
