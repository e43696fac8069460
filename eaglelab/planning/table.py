"""A plan as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from eaglelab.planning.advice import USABLE
from eaglelab.planning.plan import Plan

LABEL = 22
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
COUNTS = ("", " k", " M", " G", " T", " P", " E")


def plan_table(plan: Plan) -> str:
    """Everything of a plan, and in plain words what does not fit."""
    sections = [_models(plan), _memory(plan), _work(plan), _data(plan), _stores(plan), _verdict(plan)]
    title = f"{plan.variant} for {plan.target_name}, {_devices(plan)}"
    parts = [f"{title}\n{'-' * 80}", *("\n".join(section) for section in sections)]
    return "\n\n".join(part for part in parts if part)


def size(number: float) -> str:
    """Bytes, in the largest unit that keeps a digit before the point."""
    for unit in UNITS:
        if number < 1024 or unit == UNITS[-1]:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024
    raise AssertionError("the last unit returns")


def count(number: float) -> str:
    """A count with three digits and a prefix."""
    for prefix in COUNTS:
        if number < 999.5 or prefix == COUNTS[-1]:
            return f"{number:.3g}{prefix}"
        number /= 1000
    raise AssertionError("the last prefix returns")


def _line(label: str, value: str, remark: str = "") -> str:
    return f"{label:<{LABEL}}{value:>12}   {remark}".rstrip()


def _devices(plan: Plan) -> str:
    kind = plan.accelerator if plan.accelerator in ("cpu", "gpu") else "device"
    parts = ["target"] * plan.sharded + ["drafter"] * (plan.drafter_placement == "sharded")
    shared = f", {' and '.join(parts)} sharded" if parts else ""
    shared += ", optimizer partitioned" if plan.drafter_placement == "partitioned" else ""
    return f"{plan.devices} {kind}{'s' if plan.devices > 1 else ''}, {plan.precision}{shared}"


def _models(plan: Plan) -> Iterator[str]:
    target = plan.target
    yield _line(
        "target",
        count(target.parameters),
        f"{target.num_layers} layers, width {target.hidden_size:,}, vocabulary {target.vocab_size:,}, "
        f"{plan.target_dtype}",
    )
    yield _line("drafter, trained", count(plan.trained), f"{plan.trained / target.parameters:.1%} of the target")
    yield _line("drafter, frozen", count(plan.frozen), "the target's own: embedding and what head it uses")


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield "memory of a device at the largest step"
    rows = {
        "target weights": (memory.target, ""),
        "drafter weights": (memory.drafter, ", ".join(_weight_remarks(plan))),
        "gradients": (memory.gradients, _exchange(plan)),
        "optimizer state": (memory.optimizer, "" if plan.drafter_placement == "whole" else "this device's share"),
        "features": (memory.features, "taps and last features of a micro-batch, states of the rollout"),
        "kept for backward": (memory.kept, "activations of the drafter"),
        "loss chunk": (memory.chunk, "logits of a chunk of rows, and their gradient"),
        "target's own pass": (
            memory.target_pass,
            "beside the last three" if memory.ahead else "over before the last three begin",
        ),
    }
    for label, (number, remark) in rows.items():
        yield _line(f"  {label}", size(number), remark)
    yield _line("  peak", size(memory.peak), _room(plan))


def _weight_remarks(plan: Plan) -> Iterator[str]:
    if "mixed" in plan.precision:
        yield "with copies for mixed precision"
    if plan.drafter_placement != "whole" and plan.devices > 1:
        yield "whole during a step, and this device's share"


def _exchange(plan: Plan) -> str:
    if plan.devices == 1 or plan.drafter_placement == "sharded":
        return ""
    return "with buckets for their exchange" if plan.drafter_placement == "whole" else "with this device's share"


def _room(plan: Plan) -> str:
    if plan.device_bytes is None:
        return "device_gib=N says whether that fits"
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return f"of {size(plan.device_bytes)}: {verdict} ({1 - USABLE:.0%} stay free)"


def _work(plan: Plan) -> Iterator[str]:
    flops, devices = plan.flops, plan.devices
    each = f"{plan.micro_batch_tokens:,} a micro-batch" if plan.step_tokens != plan.micro_batch_tokens else ""
    yield "work"
    yield _line("  tokens a step", f"{plan.step_tokens:,}", each)
    yield _line("  rows a step", f"{plan.step_rows:,}", "supervised")
    yield _line("  FLOPs a step", count(flops.total * devices), _shares(plan))
    yield _line("  steps an epoch", f"{plan.steps_per_epoch:,}")
    yield _line("  FLOPs an epoch", count(flops.total * devices * plan.steps_per_epoch))
    if plan.steps is not None:
        yield _line(
            "  the training",
            f"{plan.steps:,}",
            f"steps, {plan.epochs:.2f} epochs, {count(flops.total * devices * plan.steps)} FLOPs",
        )


def _shares(plan: Plan) -> str:
    flops = plan.flops
    shares = {
        "target": flops.target,
        "drafter": flops.drafter,
        "its attention": flops.attention,
        "heads": flops.head,
        "optimizer": flops.optimizer,
    }
    return ", ".join(f"{name} {part / flops.total:.0%}" for name, part in shares.items() if part)


def _data(plan: Plan) -> Iterator[str]:
    data = plan.data
    yield "data, one epoch"
    if not data.sampled:
        how = "as told"
    elif data.spread:
        spread = data.spread / max(data.tokens, 1)
        how = f"+- {spread:.1%}, from {data.sampled:,} of {data.conversations:,.0f} conversations"
    else:
        how = f"all of {data.conversations:,.0f} conversations counted"
    yield _line("  tokens", count(data.tokens), how)
    yield _line("  supervised rows", count(data.supervised))
    yield _line("  sequences", f"{data.rows:,.0f}", f"{data.segments:.1f} conversations each" if data.packed else "")
    yield _line("  padding", f"{data.padding_share:.1%}", "of all token slots")
    if data.kept_share < 1:
        yield _line(
            "  kept", f"{data.kept_share:.1%}", "of the conversations; the others are too long or teach nothing"
        )


def _stores(plan: Plan) -> Iterator[str]:
    yield "feature store on disk (eaglelab cache)"
    for kind, number in plan.stores.items():
        remark = "" if number <= plan.free_disk else f"does not fit here: {size(plan.free_disk)} are free"
        label = f"  {kind}"
        yield f"{label:<{max(LABEL, len(max(plan.stores, key=len)) + 3)}}{size(number):>12}   {remark}".rstrip()


def _verdict(plan: Plan) -> Iterator[str]:
    if plan.fits is False:
        parts = {
            "the target's weights": plan.memory.target,
            "the drafter with gradients and optimizer": plan.memory.resident - plan.memory.target,
            "what a step keeps": plan.memory.peak - plan.memory.resident,
        }
        most = max(parts, key=lambda name: parts[name])
        yield f"This does not fit; the largest part is {most}, {size(parts[most])}."
        if plan.ways:
            yield "It fits with any of" if len(plan.ways) > 1 else "It fits with"
            width = max(len(way.change) for way in plan.ways)
            yield from (f"  {way.change:<{width}} {size(way.peak):>12}" for way in plan.ways)
        else:
            yield "No setting known here makes it fit; take larger devices or a smaller target."
    for note in plan.notes:
        yield f"note: {note}"
