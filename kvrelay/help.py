"""Commands of the program: options that take one value, and `--help` in groups."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["ALL", "COMMON", "GROUPS", "GroupedCommand", "GroupedCommands"]

ALL = "--help-all"
GROUPS = {
    "Serve": ("up", "serve", "prefill", "decode", "router", "rank"),
    "Prepare": ("key", "prefetch", "compose"),
    "Watch and steer": ("chat", "drain", "role"),
    "Measure and plan": ("bench", "profile", "plan", "replay"),
}
COMMON = frozenset(
    """
    model device dtype quantization max_model_len max_num_seqs kv_cache_memory_bytes
    gpu_memory_utilization tensor_parallel_size enable_lora lora_modules kv_host cluster_secret
    prefill decode host port api_key served_model_name tool_call_parser reasoning_parser
    out seconds demo log_dir router heartbeat_port node_api_key admin_key keys workers gpus
    ttft_target_ms ttft_target_ms_per_token tpot_target_ms
    url endpoint lengths rate concurrency requests duration_s find_rate ttft_ms tpot_ms output
    """.split()  # noqa: SIM905 - the rule would have one line of 600 characters
)


class _HelpInOrder:
    def get_help_option_names(self, ctx: Any) -> list[str]:
        return list(ctx.help_option_names)


class GroupedCommand(_HelpInOrder, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember which help is wanted, and refuse a second value of what takes one.

        The last of a setting's values counts: scripts overrule a setting by a further flag.
        """
        ctx.meta[ALL] = ALL in args
        _, _, given = self.make_parser(ctx).parse_args(args=[*args])
        several = ("multiple", "is_flag", "rich_help_panel")
        for param in given:
            if ctx.resilient_parsing:  # a shell completes the line
                break
            if given.count(param) > 1 and not any(getattr(param, each, None) for each in several):
                ctx.fail(f"{param.opts[0]} is given twice; it takes one value")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        left = 0
        for param in self.get_params(ctx):
            group = getattr(param, "rich_help_panel", None)
            if group and param.name not in COMMON and not ctx.meta[ALL]:
                left += 1
            elif (record := param.get_help_record(ctx)) is not None:
                title = "Arguments" if param.param_type_name == "argument" else group or "Options"
                sections.setdefault(title, []).append(record)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if left:
            formatter.write_paragraph()
            formatter.write_text(f"{left} more settings: {ctx.command_path} {ALL}")


class GroupedCommands(_HelpInOrder, TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(1000)) for name in names]
                )
