"""Tables of all settings, from the config types and from the commands that take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvrelay.cluster_plan import ClusterConfig
from kvrelay.flag_names import VLLM
from kvrelay.load.config import BenchConfig
from kvrelay.settings import Setting, settings_of
from kvrelay.wire.config import CacheConfig, EngineConfig, NodeConfig, RanksConfig, TransferConfig
from kvrelay.wire.router_config import KeyConfig, RouterConfig
from scripts.reference.command_line import Parameter, commands
from scripts.reference.markdown import code, table

__all__ = ["CONFIGS", "setting_pieces"]

CONFIGS = {
    "engine-settings": EngineConfig,
    "transfer-settings": TransferConfig,
    "cache-settings": CacheConfig,
    "node-settings": NodeConfig,
    "rank-settings": RanksConfig,
    "cluster-settings": ClusterConfig,
    "router-settings": RouterConfig,
    "key-settings": KeyConfig,
    "bench-settings": BenchConfig,
}
_IN_FILES_ONLY = (KeyConfig,)

Taken = Mapping[str, Mapping[str, Parameter]]


def setting_pieces() -> dict[str, str]:
    """Return a table for each config type, and one of names that are not ours."""
    taken = {each.name: {one.name: one for one in each.parameters} for each in commands()}
    others = ([code(theirs), answer] for theirs, answer in VLLM.items())
    return {name: _settings(config, taken) for name, config in CONFIGS.items()} | {
        "vllm-flags": table(["vLLM", "kvrelay"], others)
    }


def own_settings(config: type) -> dict[str, Setting]:
    """Return the settings of a type that are not a nested type's, nor a node's role."""
    own = {field.name for field in dataclasses.fields(config)} - {"role"}
    return {name: each for name, each in settings_of(config).items() if name in own}


def _settings(config: type, taken: Taken) -> str:
    own = own_settings(config)
    if config in _IN_FILES_ONLY:
        rows = (
            [code(each.name.replace("_", "-")), _default(each), each.help] for each in own.values()
        )
        return table(["Key", "Default", "Meaning"], rows)
    users = [name for name, known in taken.items() if _takes(known, config, own)]
    said = f"Taken by {', '.join(code(f'kvrelay {name}') for name in users)}.\n\n"
    rows = (_row(each, {name: taken[name] for name in users}) for each in own.values())
    return said + table(["Flag", "Variable", "Default", "Meaning"], rows)


def _takes(known: Mapping[str, Parameter], config: type, own: Mapping[str, Setting]) -> bool:
    panel = f"{config.__name__.removesuffix('Config')} settings"
    return any(name in known and known[name].panel == panel for name in own)


def _row(setting: Setting, users: Taken) -> list[str]:
    flags = code(setting.flag)
    if setting.kind is bool:
        flags += f", {code(setting.flag.replace('--', '--no-', 1))}"
    variables = sorted(
        {known[setting.name].env for known in users.values() if setting.name in known} - {""}
    )
    without = [name for name, known in users.items() if setting.name not in known]
    not_of = f" *Not of {', '.join(code(name) for name in without)}.*" if without else ""
    return [flags, ", ".join(map(code, variables)), _default(setting), setting.help + not_of]


def _default(setting: Setting) -> str:
    if setting.default is dataclasses.MISSING:
        return setting.shown or "must be given"
    return setting.shown if isinstance(setting.default, bool) else code(setting.shown)
