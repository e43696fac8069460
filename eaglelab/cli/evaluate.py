"""``eaglelab evaluate``."""

from __future__ import annotations

import time

from omegaconf import DictConfig

from eaglelab.cli.config import register_resolvers, require_multirun
from eaglelab.cli.decoding import prompts_of, sampling_of, telemetry_of
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


@command("evaluate")
def main(config: DictConfig) -> float | None:
    """Evaluate a run's drafter; prints the table, writes ``metrics.json``, returns tau (None without a round)."""
    from eaglelab.decoding import make_tree
    from eaglelab.evaluation import Settings, evaluate, table, telemetry_table
    from eaglelab.training import RunFolder

    require_multirun()
    quiet_libraries()
    folder = RunFolder.existing(config.run)
    tree = make_tree(**config.tree)
    settings = Settings(
        max_new_tokens=config.max_new_tokens,
        turns=config.turns,
        sampling=sampling_of(config),
        batch=config.batch,
        check_generate=config.check_generate,
        compile=config.compile,
        graphs=config.graphs,
    )
    source, prompts = prompts_of(config)
    target = folder.load_target(source=config.target.source, dtype=config.dtype, device=config.device)
    drafter = folder.load_drafter(target, config.checkpoint)
    with telemetry_of(config) as telemetry:
        result = evaluate(target, drafter, tree, prompts, settings, on_record=telemetry.take)

    figures = result.to_dict()
    if telemetry.asked:
        figures["telemetry"] = telemetry.summary(figures["seconds"]["decode"])
    figures["settings"] |= {"data": source, "checkpoint": config.checkpoint}
    name = f"evaluations/{config.tree.name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}.json"
    folder.update_metrics(figures, name)
    written = folder.update_metrics({k: v for k, v in figures.items() if k != "per_prompt"} | {"per_prompt_file": name})
    print(f"\n{table(figures, title=f'{folder.path}, tree={config.tree.name}')}")
    if telemetry.asked:
        print(f"\n{telemetry_table(figures['telemetry'])}")
    print(f"\nwritten: {written}")
    if result.partial:
        raise SystemExit(130)
    return figures["tau"]


if __name__ == "__main__":
    main()
