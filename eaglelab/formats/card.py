"""The model card of an exported drafter: what it is, what it needs, how to start it."""

from __future__ import annotations

from typing import Any

from eaglelab.drafters import DraftNetwork, FusedDrafter
from eaglelab.formats.layouts import Format

_NAMES = {"eagle": "EAGLE-1", "hass": "HASS", "eagle3": "EAGLE-3"}


def model_card(
    record: dict[str, Any], format: str, shape: Format, network: DraftNetwork, dtype: str, draft_tokens: int
) -> str:
    """README.md in Markdown, from the record alone, so that it does not change when the export is imported."""
    manifest = record["manifest"]
    variant, target = manifest["variant"], manifest["target"]
    parts = [
        _front_matter(target["source"], variant),
        f"# {_NAMES[variant]} drafter for {target['source']}\n",
        f"A speculative-decoding drafter in the format `{format}` ({shape.client}), written by eaglelab. It drafts for "
        "this one target; with another model or revision it only accepts less.\n",
        _table(("", ""), _facts(manifest, network, dtype)),
        _launch(format, variant, draft_tokens),
        _figures(record["metrics"]),
        _switches(manifest["switches"]),
        "`eaglelab.json` holds the full manifest; `eaglelab import source=DIR` reads it back.\n",
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(source: str, variant: str) -> str:
    lines = ["---", "tags:", "- speculative-decoding", f"- {variant}"]
    if source.count("/") == 1 and not source.startswith("."):  # a hub id
        lines.insert(1, f"base_model: {source}")
    return "\n".join([*lines, "---", ""])


def _facts(manifest: dict[str, Any], network: DraftNetwork, dtype: str) -> list[tuple[str, str]]:
    target, config = manifest["target"], network.config
    rows = [
        ("target", f"{target['source']}, revision {target['revision'] or 'not recorded'}"),
        ("target weights, SHA-256", target["weights"][:16]),
        ("streams read", ", ".join(map(str, manifest["taps"]))),
        ("parameters", f"{sum(p.numel() for p in network.parameters()):,}, stored as {dtype}"),
        ("hidden size, heads, MLP", f"{config.hidden_size}, {config.num_attention_heads}, {config.intermediate_size}"),
        ("positions", f"{config.max_position_embeddings}"),
        ("RoPE", ", ".join(f"{key}={value}" for key, value in sorted(config.rope_parameters.items()))),
        ("bias of fc", "yes" if config.fc_bias else "no"),
    ]
    if isinstance(network, FusedDrafter):
        rows.append(("draft vocabulary", f"{config.draft_vocab_size or config.vocab_size} of {config.vocab_size}"))
    return rows


def _launch(format: str, variant: str, draft_tokens: int) -> str:
    method = "eagle3" if variant == "eagle3" else "eagle"
    vllm = (
        "vllm serve TARGET --speculative-config "
        f'\'{{"method": "{method}", "model": "DIR", "num_speculative_tokens": {draft_tokens}}}\''
    )
    sglang = (
        f"python -m sglang.launch_server --model-path TARGET --speculative-algorithm {method.upper()} "
        f"--speculative-draft-model-path DIR --speculative-num-steps {draft_tokens} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {draft_tokens + 1}"
    )
    safeailab = (
        'EaModel.from_pretrained(base_model_path="TARGET", ea_model_path="DIR", '
        f"use_eagle3={variant == 'eagle3'})  # SafeAILab EAGLE"
    )
    command = {"eagle": safeailab, "eagle3": safeailab, "speculators": "vllm serve DIR", "vllm": vllm, "sglang": sglang}
    language = "python" if format in ("eagle", "eagle3") else "sh"
    return f"## Start\n\n```{language}\n{command[format]}\n```\n\n`DIR` is this folder, `TARGET` the target's.\n"


def _figures(metrics: dict[str, Any]) -> str:
    if metrics.get("tau") is None:
        return "## Measured\n\nNot evaluated yet (`eaglelab evaluate run=DIR`).\n"
    settings, ends = metrics.get("settings", {}), metrics.get("tau_interval")
    tree = settings.get("tree", {})
    rows = [
        (
            "tree",
            ", ".join(f"{key} {value}" for key, value in sorted(tree.items()) if not isinstance(value, list | dict)),
        ),
        ("tau", f"{metrics['tau']:.2f}" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")),
        ("answers", str(metrics.get("answers", "not recorded"))),
        ("temperature", str(settings.get("temperature", "not recorded"))),
        ("share of rounds with k accepted", ", ".join(f"{s:.0%}" for s in metrics.get("accepted_by_depth", []))),
    ]
    note = "tau: accepted draft tokens + 1, averaged over all rounds; 95 % interval. Measured by eaglelab.\n"
    return f"## Measured\n\n{_table(('', ''), rows)}\n{note}"


def _switches(switches: dict[str, Any]) -> str:
    rows = [(f"`{key}`", f"`{value}`") for key, value in sorted(switches.items())]
    return f"## Trained with\n\n{_table(('switch', 'value'), rows)}" if rows else ""


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
    return "\n".join(lines) + "\n"
