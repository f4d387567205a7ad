"""What a config.json says of quantized weights. Never imports torch; the weights are
quantization.py's.
"""

from __future__ import annotations

from dataclasses import replace

from kvrelay.paged_engine.model_config import Fields, Quantization
from kvrelay.wire.errors import ConfigError

__all__ = ["quantization_of"]

_FORMATS = ("float-quantized", "naive-quantized")


def quantization_of(fields: Fields) -> Quantization | None:
    """What a config.json says of fp8 weights; None if it says nothing.

    Raises ConfigError, naming it, for every quantization that is not fp8 in one of the two layouts.
    """
    key = "compression_config" if fields.has("compression_config") else "quantization_config"
    said = fields.section(key)
    if not said.values:
        return None
    method = said.text("quant_method", "unknown")
    if method == "compressed-tensors":
        return _compressed_tensors(said)
    if method == "fp8":
        return _fp8(said)
    raise ConfigError(
        f"{fields.where}: {key} ({method}) is not supported; compressed-tensors with fp8 weights "
        f"and fp8 are. "
        "Use the model's unquantized safetensors, an FP8 checkpoint or a GGUF file"
    )


def _fp8(said: Fields) -> Quantization:
    blocks = said.integers("weight_block_size")
    if len(blocks) not in (0, 2) or any(size < 1 for size in blocks):
        raise ConfigError(f"{said.where}: weight_block_size must be two sizes, got {list(blocks)}")
    activations = said.text("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise ConfigError(
            f"{said.where}: activation_scheme {activations!r} is not supported; dynamic and "
            f"static are"
        )
    return Quantization(
        scales="block" if blocks else "tensor",
        activations=activations,
        targets=("Linear",),
        # The output layer is never quantized in this layout, whether or not it is named.
        ignored=(*said.texts("ignored_layers"), *said.texts("modules_to_not_convert"), "lm_head"),
        block=(blocks[0], blocks[1]) if blocks else (0, 0),
    )


def _compressed_tensors(said: Fields) -> Quantization:
    if (
        said.section("sparsity_config").text("format", "dense") != "dense"
        or said.section("transform_config").values
    ):
        raise ConfigError(f"{said.where}: sparsity_config and transform_config are not supported")
    groups = said.section("config_groups")
    found = [_group(groups.section(name), said.text("format", "unknown")) for name in groups.values]
    if not found:
        raise ConfigError(f"{said.where} has no config_groups")
    targets = tuple(target for group in found for target in group.targets)
    if len({replace(group, targets=()) for group in found}) > 1:
        raise ConfigError(
            f"{said.where}: config_groups that differ are not supported; one kind of fp8 weights is"
        )
    return replace(found[0], targets=targets, ignored=said.texts("ignore"))


def _group(group: Fields, form: str) -> Quantization:
    weights, inputs = group.section("weights"), group.section("input_activations")
    form = group.text("format", form)
    kind = f"{form} {weights.text('type', 'int')}{weights.integer('num_bits', 8)}"
    if kind not in [f"{known} float8" for known in _FORMATS]:
        raise ConfigError(
            f"{group.where}: {kind} weights are not supported; {_FORMATS[0]} float8 is"
        )
    strategy = weights.text("strategy", "tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise ConfigError(
            f"{weights.where}: strategy {strategy!r} is not supported; tensor, channel and block "
            f"are"
        )
    if not weights.flag("symmetric", True) or weights.flag("dynamic", False):
        raise ConfigError(
            f"{weights.where}: only symmetric, static scales of weights are supported"
        )
    blocks = weights.integers("block_structure") if strategy == "block" else (0, 0)
    if len(blocks) != 2 or (strategy == "block" and min(blocks) < 1):
        raise ConfigError(f"{weights.where}: block_structure must be two sizes, got {list(blocks)}")
    return Quantization(
        scales=strategy,
        activations=("dynamic" if inputs.flag("dynamic", False) else "static")
        if inputs.values
        else "none",
        targets=group.texts("targets"),
        ignored=(),
        block=(blocks[0], blocks[1]),
    )
