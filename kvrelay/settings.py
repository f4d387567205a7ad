"""Settings: flags and config files, both made from the fields of the frozen config types.

Owns the order flags > file > defaults.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from kvrelay.flag_names import VALUES, answer_for
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.json_object import JsonObject

__all__ = [
    "CPU",
    "Setting",
    "Values",
    "build",
    "convert",
    "flags_of",
    "merge",
    "nearest",
    "read_file",
    "settings_of",
    "without",
]

_Config = TypeVar("_Config")

Values = dict[str, object]
"""Values of settings, by name."""
_KINDS: dict[object, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple[str, ...]: "a list of texts",
    JsonObject: "a JSON object",
}
_IN_UNITS = re.compile(
    r"(?P<number>\d{1,20}(?:\.\d{1,20})?) ?(?P<unit>[kmgt])(?P<binary>i?)(?P<bytes>b?)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a config type, as a flag and as a key of a file.

    `kind` is a key of _KINDS, or a config type or a tuple of one: a mapping or a list of mappings
    in a file, JSON in a flag.
    """

    name: str
    kind: Any
    default: Any
    help: str
    group: str
    secret: bool = False
    """The value is shown nowhere (the field has no repr)."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def item(self) -> type | None:
        first = (typing.get_args(self.kind) or (self.kind,))[0]
        return typing.cast(type, first) if dataclasses.is_dataclass(first) else None

    @property
    def several(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def shown(self) -> str:
        """Return the default in words; empty if there is none."""
        if self.name == "model" and self.default is dataclasses.MISSING:
            return "the embedded model"
        if self.default in (dataclasses.MISSING, None):
            return ""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return ", ".join(self.default) if isinstance(self.default, tuple) else str(self.default)


CPU = Setting("cpu", bool, False, "Short for --device cpu.", "Engine")
"""An alias of `device: cpu`; no field of any config."""


def settings_of(config: type, skip: Collection[str] = ()) -> dict[str, Setting]:
    """Return all settings of a config type by name, nested ones included, but those in `skip`."""
    found: dict[str, Setting] = {}
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(kind := hints[field.name]):
            left_out = {*skip, *field.metadata.get("skip", ())}
            inner = settings_of(typing.cast(type, kind), left_out)
            found |= {name: each for name, each in inner.items() if name not in found}
        elif field.name not in skip:
            group = config.__name__.removesuffix("Config")
            about = _docs(config).get(field.name, "")
            found[field.name] = Setting(
                field.name, _typed_as(kind), field.default, about, group, secret=not field.repr
            )
    return found


def without(*names: str) -> dict[str, tuple[str, ...]]:
    """Return metadata for the field of a nested config, of which these are no settings here."""
    return {"skip": names}


def _typed_as(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        return typing.get_args(kind)[0]
    return type(typing.get_args(kind)[0]) if typing.get_origin(kind) is typing.Literal else kind


@cache
def _docs(config: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in config.__mro__[1:-1]:
        docs |= _docs(base)
    body = typing.cast(
        ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    ).body
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            docs[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return docs


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a clause with the right name for `name`: vLLM's counterpart, or the nearest."""
    if answer := answer_for(name):
        return f"; {answer}"
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.66)
    return f"; did you mean {close[0]}?" if close else ""


def convert(setting: Setting, raw: object, source: str) -> object:
    """Return a setting's value, of a flag's text or a file's value at `source`. Raises ConfigError."""
    if setting.item is not None:
        return (_items if setting.several else _item)(setting.item, raw, source)
    try:
        return _converted(setting.kind, VALUES.get(setting.name, {}).get(str(raw), raw))
    except ValueError:
        hint = ""
        if setting.kind is str and isinstance(raw, (int, float)):
            hint = "; put it in quotes"
        elif setting.kind is int and isinstance(raw, str) and raw[:1].isdigit():
            hint = "; units are as in 32k and 4GiB"
        got = repr(raw) if isinstance(raw, str) else f"{raw!r} ({type(raw).__name__})"
        if setting.secret:
            got = f"{type(raw).__name__} (not shown)"
        raise ConfigError(f"{source} must be {_KINDS[setting.kind]}, got {got}{hint}") from None


def _converted(kind: Any, raw: Any) -> object:
    if isinstance(raw, str):
        if kind is bool:
            raw = {"yes": True, "on": True, "no": False, "off": False}.get(raw.lower(), raw)
        elif kind is float:
            raw = float(raw)
        elif kind is int:
            raw = _whole(raw)
        elif kind == JsonObject:
            raw = json.loads(raw)
        elif kind == tuple[str, ...]:
            raw = [raw]
    if kind == tuple[str, ...] and isinstance(raw, (list, tuple)):
        raw = [text for item in raw for text in _listed(item)]
    # Not strict: YAML reads 100e6 as text (it wants 100.0e+6).
    return msgspec.convert(raw, kind, strict=kind is str)


def _listed(item: object) -> list[object]:
    if isinstance(item, str) and item.startswith("["):
        with suppress(ValueError):
            return list(json.loads(item))
    return [item]


def _whole(text: str) -> object:
    found = _IN_UNITS.fullmatch(text.strip())
    if found is None:
        return int(text)
    decimal = not found["binary"] and (bool(found["bytes"]) or found["unit"].islower())
    value = Fraction(found["number"]) * (1000 if decimal else 1024) ** (
        1 + "kmgt".index(found["unit"].lower())
    )
    return int(value) if value.denominator == 1 else text


def _items(config: type, raw: object, source: str) -> tuple[object, ...]:
    if not isinstance(raw, (list, tuple)):
        raise ConfigError(f"{source} must be a list of mappings, got a {type(raw).__name__}")
    return tuple(_item(config, item, f"{source}[{at}]") for at, item in enumerate(raw))


def _item(config: type, raw: object, where: str) -> object:
    known = settings_of(config)
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raise ConfigError(f"{where} must be a JSON object; its text is not JSON") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must be a mapping, got a {type(raw).__name__}")
    values = _mapping({key: value for key, value in raw.items() if value is not None}, known, where)
    missing = [
        name
        for name, each in known.items()
        if each.default is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise ConfigError(f"{where}: {' and '.join(missing)} missing")
    return build(config, values)


def read_file(path: str, known: Mapping[str, Setting]) -> Values:
    """Return the settings of a YAML file in kebab-case or snake_case. Raises ConfigError."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as why:
        # Not in its own words, which may quote a secret.
        line = f"line {why.problem_mark.line + 1}" if why.problem_mark else "it"
        raise ConfigError(
            f"cannot read config file {path}: {line} is not valid YAML; values with special "
            f"characters need quotes"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as why:
        raise ConfigError(f"cannot read config file {path}: {' '.join(str(why).split())}") from why
    if not isinstance(content, dict):
        if content is None:
            return {}
        raise ConfigError(
            f"config file {path} must hold `key: value` lines, got a {type(content).__name__}"
        )
    return _mapping(content, known, path)


def _mapping(content: Mapping[object, object], known: Mapping[str, Setting], source: str) -> Values:
    values: Values = {}
    for key, raw in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{source}: unknown key {str(key)!r}{nearest(name, known)}")
        if name in values:
            raise ConfigError(f"{source}: key {name} is given twice")
        values[name] = convert(known[name], raw, f"{source}: {key}")
    return values


def merge(known: Mapping[str, Setting], flags: Mapping[str, object], file: str | None) -> Values:
    """Return the values of a config file, overruled by the flags that are not None.

    Raises ConfigError.
    """
    known = {**known, "cpu": CPU} if "device" in known else known
    from_file = _in_full(read_file(file, known), f"{file}: cpu", "device") if file else {}
    typed = {
        name: convert(known[name], raw, known[name].flag)
        for name, raw in flags.items()
        if raw is not None
    }
    return from_file | _in_full(typed, "--cpu", "--device")


def _in_full(values: Values, cpu: str, device: str) -> Values:
    if values.pop("cpu", False) and values.setdefault("device", "cpu") != "cpu":
        raise ConfigError(
            f"{cpu} and {device} {values['device']} contradict each other; leave one of them out"
        )
    return values


def build(config: type[_Config], values: Mapping[str, object]) -> _Config:
    """Return a config of that type with these values, nested ones included. Raises ConfigError."""
    hints = typing.get_type_hints(config)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, config)):
        if dataclasses.is_dataclass(kind := hints[field.name]):
            left_out = field.metadata.get("skip", ())
            own = {name: value for name, value in values.items() if name not in left_out}
            arguments[field.name] = build(typing.cast(type, kind), own)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return config(**arguments)


def flags_of(config: object, skip: Collection[str] = ()) -> list[str]:
    """Return the flags that make this config again: one for each setting not at its default."""
    flags: list[str] = []
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(typing.cast(Any, config)):
        value = getattr(config, field.name)
        flag = "--" + field.name.replace("_", "-")
        if dataclasses.is_dataclass(hints[field.name]):
            flags += flags_of(value, skip)
        elif field.name in skip or value == field.default:
            continue
        elif isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            for item in map(_flag_text, value if isinstance(value, tuple) else (value,)):
                # With `=`: a value may start with a dash.
                flags.append(f"{flag}={item}")
    return flags


def _flag_text(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        value = {field.name: told for field, told in fields if told != field.default}
    return json.dumps(value) if isinstance(value, dict) else value
