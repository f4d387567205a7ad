"""Loading of what a node needs beside its engine: tokenizer, chat template, formats of a model."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kvrelay.node.engine_client import EngineClient
from kvrelay.node.sandbox import Sandbox, Setup
from kvrelay.node.serving import Serving
from kvrelay.openai_api.chat_template import check_template
from kvrelay.openai_api.generation_config import sampling_defaults
from kvrelay.openai_api.model_formats import load_plugin, reasoning_format, tool_format
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.errors import ConfigError

__all__ = ["check_model_name", "load_serving", "read_template"]

log = logging.getLogger("kvrelay.node")


async def load_serving(config: NodeConfig, engine: EngineClient, sandbox: Sandbox) -> Serving:
    """Load the tokenizer while the engine loads the model, open the sandbox, return the Serving.

    Raises ConfigError, EngineDead.
    """
    if config.tool_parser_plugin:
        await asyncio.to_thread(load_plugin, config.tool_parser_plugin)
    tokenizer = await asyncio.to_thread(load_tokenizer, config.engine.model)
    template = await asyncio.to_thread(read_template, config.chat_template)
    tools = tool_format(
        config.tool_call_parser, template or tokenizer.tool_template, tokenizer.model_type
    )
    reasoning = reasoning_format(
        config.reasoning_parser, template or tokenizer.chat_template, tokenizer.model_type
    )
    names = [row[0] if row else "none" for row in (tools, reasoning)]
    log.info("tool calls are read as %s writes them, reasoning as %s", *names)
    info = await engine.ready(config.start_deadline_s)
    sandbox.open(
        Setup(
            config.engine.model,
            template,
            config.trust_request_chat_template,
            info.max_model_len,
            info.vocab_size,
            list(info.eos_token_ids),
            names[0],
            config.tool_parser_plugin,
        )
    )
    model_name = config.served_model_name or info.model_name
    check_model_name(model_name, config.engine)
    return Serving(
        config.role,
        model_name,
        template,
        tokenizer,
        info,
        tool_format=tools[1] if tools else None,
        reasoning=reasoning[1] if reasoning else None,
        trusts_request_templates=config.trust_request_chat_template,
        defaults=sampling_defaults(config.engine, info.model_name),
    )


def check_model_name(name: str, engine: EngineConfig) -> None:
    """Raise ConfigError if one of the engine's adapters has the model's name."""
    if name in [adapter for adapter, _ in engine.adapters]:
        raise ConfigError(
            f"an adapter is named {name!r}, as the model itself is; give it another name in "
            f"lora_modules"
        )


def read_template(path: str) -> str | None:
    """Return a chat template, or None for no path. Raises ConfigError."""
    if not path:
        return None
    try:
        template = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"the chat template {path} cannot be read: {why}") from why
    check_template(template)
    return template
