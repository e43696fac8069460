"""``eaglelab VERB key=value ...``"""

from __future__ import annotations

import importlib
import sys
from keyword import iskeyword

VERBS = {
    "train": "train a drafter: eaglelab train variant=eagle",
    "cache": "keep the target's features, to train without running it: eaglelab cache variant=eagle3 out=DIR",
    "plan": "what a training will need, before anything is loaded: eaglelab plan variant=hass devices=8 device_gib=80",
    "evaluate": "decode held-out prompts with and without the drafter: eaglelab evaluate run=DIR",
    "compare": "train variants under one budget, measure and compare them: eaglelab compare variants=[eagle,hass]",
    "diff": "what separates two runs: eaglelab diff RUN RUN",
    "report": "a page to look at: eaglelab report compare=DIR, or trees=rounds.parquet for draft trees",
    "doctor": "which wiring was a drafter trained for: eaglelab doctor run=DIR",
    "bench": "cost of steps, decoding, kernels: eaglelab bench, bench decoding run=DIR, bench kernels, bench rounds",
    "tune": "the fastest tree on this machine: eaglelab tune run=DIR",
    "generate": "answer a prompt, or a file of them to train on: eaglelab generate run=DIR data=FILE out=FILE",
    "import": "a published drafter becomes a run folder: eaglelab import source=DIR target.source=DIR out=DIR",
    "export": "a run's drafter for vLLM, SGLang and others: eaglelab export run=DIR format=vllm out=DIR",
}


def usage() -> str:
    lines = ["usage: eaglelab VERB [key=value ...]", ""]
    lines += [f"  {verb:<10} {what}" for verb, what in VERBS.items()]
    return "\n".join([*lines, "", "eaglelab VERB --help lists a verb's settings and their defaults."])


def main(argv: list[str] | None = None) -> None:
    """Hand the arguments after the verb to ``eaglelab.cli.VERB.main``. Exit code 2 for an unknown verb."""
    arguments = sys.argv[1:] if argv is None else argv
    verb = arguments[0] if arguments else ""
    if verb in ("-h", "--help", "help"):
        print(usage())
        return
    if verb not in VERBS:
        print(
            f"error: {'no verb given' if not verb else f'unknown verb {verb!r}'}\n\n{usage()}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    module = importlib.import_module(f"eaglelab.cli.{verb}{'_' if iskeyword(verb) else ''}")
    # Launchers of further processes start the job again from argv[0] (or, under python -m, from the module that was
    # run), so argv[0] must be a file that runs this verb
    sys.argv = [str(module.__file__), *arguments[1:]]
    sys.modules["__main__"].__spec__ = None
    module.main()


if __name__ == "__main__":
    main()
