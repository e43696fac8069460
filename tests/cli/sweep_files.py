"""A W&B sweep file as W&B reads it: its schema, its grid, and the command line that an agent runs for a point."""

import itertools
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "sweeps"
FILES = sorted(FOLDER.glob("*.yaml"))

KNOWN = {
    "name": str,
    "description": str,
    "project": str,
    "entity": str,
    "program": str,
    "method": str,
    "metric": dict,
    "command": list,
    "parameters": dict,
    "run_cap": int,
    "early_terminate": dict,
}


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def violations(config: dict[str, Any]) -> list[str]:
    """What W&B's schema (of the package `sweeps` 0.3.0) refuses in a grid over listed values."""
    found = [f"unknown key {name}" for name in config if name not in KNOWN]
    found += [f"{k} is no {kind.__name__}" for k, kind in KNOWN.items() if k in config and type(config[k]) is not kind]
    if config.get("method") != "grid":
        found.append("method is not grid")
    metric = config.get("metric", {})
    if set(metric) - {"name", "goal", "target", "impute"} or not isinstance(metric.get("name"), str):
        found.append("metric needs a name")
    if metric.get("goal", "minimize") not in ("minimize", "maximize"):
        found.append("metric.goal is neither minimize nor maximize")
    for name, parameter in config.get("parameters", {}).items():
        if not isinstance(parameter, dict) or set(parameter) not in ({"value"}, {"values"}):
            found.append(f"{name} has neither value nor values alone")
        elif "values" in parameter and not (isinstance(parameter["values"], list) and parameter["values"]):
            found.append(f"{name}.values is no list of at least one value")
    if not config.get("parameters"):
        found.append("no parameters")
    return found


def points(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every point of the grid, as the agent gets it."""
    choices = [
        [(name, value) for value in parameter.get("values", [parameter.get("value")])]
        for name, parameter in config["parameters"].items()
    ]
    return [dict(point) for point in itertools.product(*choices)]


def agent_command(config: dict[str, Any], point: dict[str, Any]) -> list[str]:
    """The argv of `wandb agent` for a point, made by W&B's own code; compare `wandb.wandb_agent.Agent._command_run`."""
    from wandb.sdk.launch.sweeps import utils

    macros = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in point.items()}})
    macros |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [config["program"]]}
    line: list[str] = []
    for part in utils.create_sweep_command(list(config["command"])):
        macro = part.startswith("${") and part.endswith("}")
        line += macros[part[2:-1]] if macro else [part]
    return line
