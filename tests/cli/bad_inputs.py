"""Wrong inputs of every verb and group of settings: what is asked, and what the one line of the answer must say."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One wrong command.

    arguments: of the command line; {run} is a trained run, {bad} the folder of damaged runs and targets.
    says: texts of the line that begins with "error:", in this order.
    """

    arguments: str
    says: tuple[str, ...]

    @property
    def name(self) -> str:
        words = [word for word in self.arguments.split() if word not in _USUAL]
        return " ".join(words).replace("{run}", "RUN").replace("{bad}/", "")


def chats(*turns: tuple[str, str], times: int = 1) -> str:
    row = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    return f"{row}\n" * times


FILES: dict[str, bytes] = {
    name: content.encode()
    for name, content in {
        "good.jsonl": chats(("user", "How many?"), ("assistant", "Five eggs in all."), times=6),
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "broken.jsonl": chats(("user", "a"), ("assistant", "b")) + '{"messages": [\n',
        "list.jsonl": "[1, 2]\n",
        "keys.jsonl": '{"text": "a"}\n',
        "role.jsonl": chats(("user", "a"), ("wizard", "b")),
        "questions.jsonl": chats(("user", "a b c"), times=4),
        "number.jsonl": '{"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "x"}]}\n',
        "no_turn.jsonl": '{"messages": []}\n',
        "word.jsonl": chats(("user", "x" * 100_000), ("assistant", "y"), times=3),
        "twice.jsonl": '{"id": "a", "question": "How many?"}\n' * 2,
        "book.jsonl": json.dumps({"id": "a", "question": "x " * 100_000}) + "\n",
        "prompts.jsonl": '{"id": "a", "question": "How many?"}\n',
        "open.jinja": "{% for m in messages %}{{ m.content }",
        "constant.jinja": "constant",
        "damaged.parquet": "nope",
        "table.csv": "a,b\n1,2\n",
        "garbage": "\x00\x01garbage",
        "file": "x",
        "folder/x": "1",
    }.items()
} | {"latin.jsonl": "é".encode("latin-1")}

_SMALL = "trainer.max_steps=1 trainer.val_check_interval=1 data.batch_size=1 logger=none hydra.run.dir=new"
_TRAIN = f"train data.limit=4 data.val_limit=2 {_SMALL} "
_DATA = f"train data=jsonl data.val_fraction=0 {_SMALL} data.path="
_TARGET = f"train data.limit=4 data.val_limit=2 {_SMALL} target=hf target.source="
_EVAL = "evaluate run={run} limit=1 max_new_tokens=4 "
_GEN = "generate run={run} max_new_tokens=4 "
_SERVER = "generate server=http://127.0.0.1:9/v1 model=x data=prompts.jsonl out=o.jsonl "
_CACHE = "cache data.limit=4 data.val_limit=2 out=store "
_COMPARE = "compare out=compared "

TABLE: list[tuple[str, str, str]] = [
    # settings: typos, syntax, groups, kinds
    ("train vairant=hass", "no setting vairant", "did you mean variant?"),
    ("train data.paht=x", "no setting data.paht", "data.path"),
    ("train variant=eagel", "variant/eagel", "eagle eagle3 hass"),
    ("train experiment=none_such", "experiment/none_such", "eagle3_pinned"),
    ("train optim.lr=[1", "'optim.lr=[1'", "write key=value"),
    ("train hass", "'hass'", "write key=value"),
    ("train sweep=noise", "sweep=noise", "add -m"),
    ("train -m sweep=nois", "sweep/nois", "noise"),
    (_TRAIN + "+variant.foo=1", "no setting variant.foo", "leave it out"),
    (_TRAIN + "+trainer.foo=1", "no setting trainer.foo", "leave it out"),
    (_TRAIN + "data.batch_size=two", "data.batch_size=two is no number", "default"),
    (_TRAIN + "variant=eagle3 variant.draft_vocab_size=40.5", "variant.draft_vocab_size=40.5", "whole number"),
    (_TRAIN + "data.packing=perhaps", "data.packing=perhaps", "true or false"),
    (_TRAIN + "deterministic=maybe", "deterministic=maybe", "true or false"),
    (_TRAIN + "optim.lr=nan", "optim.lr=nan", "finite"),
    (_TRAIN + "optim.betas=0.9", "optim.betas=0.9", "a list"),
    (_TRAIN + "seed=-1", "seed=-1", "from 0"),
    (_TRAIN + "stages=5", "stages=5", "a list"),
    # data
    ("train data=jsonl", "data.path", "give data.path="),
    (_DATA + "missing.jsonl", "missing.jsonl: no such file", "check the path"),
    (_DATA + "empty.jsonl", "empty.jsonl: holds no conversation", "check the path"),
    (_DATA + "blank.jsonl", "blank.jsonl: holds no conversation", "check the path"),
    (_DATA + "broken.jsonl", "broken.jsonl:2", "one complete object per line"),
    (_DATA + "list.jsonl", "list.jsonl:1: is a list", "`messages`"),
    (_DATA + "keys.jsonl", "keys.jsonl:1: has `text`", "`messages`"),
    (_DATA + "latin.jsonl", "latin.jsonl:1: is not UTF-8", "save the file as UTF-8"),
    (_DATA + "role.jsonl", "unknown role 'wizard'", "system, user, assistant"),
    (_DATA + "questions.jsonl", "no assistant answer", "let the target answer"),
    (_DATA + "number.jsonl", "`messages[0].content` is int 5", "must be text"),
    (_DATA + "no_turn.jsonl", "`messages` is list []", "at least one"),
    (_DATA + "word.jsonl", "no conversation is left", "overlength=truncate"),
    (_DATA + "damaged.parquet", "damaged.parquet: cannot be read", "complete?"),
    (_DATA + "table.csv", "unknown file type", ".jsonl"),
    (_DATA + "folder", "folder without data files", ".jsonl"),
    (_DATA + "good.jsonl data.val_path=empty.jsonl", "empty.jsonl", "check the path"),
    (_DATA + "good.jsonl data.val_fraction=0.5", "at least two different prompts", "val_fraction=0"),
    (_DATA + "good.jsonl data.val_fraction=1.5", "val_fraction=1.5", "[0, 1)"),
    (_TRAIN + "data.max_length=1", "max_length=1", "at least 2"),
    (_TRAIN + "data.row_length=10", "row_length=10", "raise row_length"),
    (_TRAIN + "data.max_length=9999 data.row_length=9999", "data.max_length=9999", "lower data.max_length"),
    (_TRAIN + "data.overlength=cut", "overlength='cut'", "drop, truncate"),
    (_TRAIN + "data.limit=0", "limit=0", "positive number"),
    (_TRAIN + "data.val_limit=0", "val_limit=0", "at least 1"),
    (_TRAIN + "data.num_workers=-1", "num_workers=-1", "use 0"),
    (_TRAIN + "data.chat_template=missing.jinja", "chat_template=missing.jinja", "no such file"),
    (_TRAIN + "data.chat_template=open.jinja", "rejects a chat", "chat_template=FILE"),
    (_TRAIN + "data.chat_template=constant.jinja", "cannot find the assistant's answers", "{% generation %}"),
    # target
    ("train target=hf", "target.source", "give target.source="),
    (_TARGET + "./missing", "./missing does not exist", "Give a folder"),
    (_TARGET + "folder", "no config.json", "Give the folder"),
    (_TARGET + "{bad}/target-without-weights", "no file named model.safetensors"),
    (_TARGET + "{bad}/target-half-downloaded", "target-half-downloaded could not be loaded"),
    (_TARGET + "{bad}/target-truncated", "target-truncated could not be loaded", "header"),
    (_TARGET + "{bad}/target-nan", "'model.layers.0.input_layernorm.weight' holds NaN", "download or convert it again"),
    (_TARGET + "{bad}/target-without-template", "no chat template", "chat_template=FILE"),
    (_TARGET + "{bad}/target-without-tokenizer", "has no tokenizer"),
    (_TARGET + "{bad}/target-no-json", "not a valid JSON file"),
    (_TRAIN + "target.dtype=float17", "'float17' is unknown", "use one of float32"),
    # recipe, variant, drafter, trainer
    (_TRAIN + "optim.lr=-1", "lr=-1", "must be positive"),
    (_TRAIN + "optim.warmup_steps=-5", "optim.warmup_steps=-5", "must not be negative"),
    (_TRAIN + "optim.clip_norm=-1", "optim.clip_norm=-1", "null leaves it out"),
    (_TRAIN + "optim.clip_value=1 optim.clip_norm=1", "clip_value or clip_norm, not both"),
    (_TRAIN + "optim.schedule=stairs", "optim.schedule='stairs'", "linear, cosine, constant"),
    (_TRAIN + "variant.noise=loud", "noise law 'loud'", "paper_uniform"),
    (_TRAIN + "variant.smooth_l1_beta=-1", "variant.smooth_l1_beta=-1", "must not be negative"),
    (_TRAIN + "variant=eagle3 variant.steps=0", "variant.steps=0", "1 to 10"),
    (_TRAIN + "variant=eagle3 variant.taps=[1,2,99]", "tap 99", "use an integer from 0 to 11"),
    (_TRAIN + "variant=eagle3 variant.draft_vocab_size=99999999", "draft_vocab_size=99999999", "between 1 and"),
    (_TRAIN + "variant=hass variant.passes=0", "variant.passes=0", "1 to 5"),
    (_TRAIN + "variant.drafter.intermediate_size=0", "intermediate_size=0", "set variant.drafter.intermediate_size"),
    (_TRAIN + "variant.drafter.num_attention_heads=5", "num_attention_heads=5", "set both"),
    (_TRAIN + "trainer.max_steps=0", "trainer.max_steps=0 trains nothing", "at least 1"),
    (_TRAIN + "trainer.val_check_interval=0", "trainer.val_check_interval=0", "at least 1"),
    (_TRAIN + "trainer.precision=fp8", "trainer.precision=fp8", "bf16-mixed"),
    (_TRAIN + "trainer.accelerator=quantum", "accelerator='quantum'", "Available names"),
    # where a training goes and starts from
    (_TRAIN + "checkpoint_steps=true", "checkpoint_steps=true does nothing for eagle", "leave it out"),
    (_TRAIN + "kernels=fast", "kernels='fast' is not one of auto, torch", "PyTorch's own"),
    (_TRAIN + "ckpt_path=last", "no checkpoint at", "train first"),
    (_TRAIN + "ckpt_path=garbage", "garbage cannot be read as a checkpoint", "use another one"),
    (_TRAIN + "init_from=missing", "no checkpoint at missing", "name a file"),
    (_TRAIN + "init_from=folder", "folder has no manifest.json", "give the folder"),
    (_TRAIN + "variant=eagle3 init_from={run}", "field taps", "Way out"),
    (_TRAIN + "features=store features.path=folder", "folder holds no feature store", "eaglelab cache"),
    (_TRAIN.replace("=new", "={run}"), "already holds a run", "ckpt_path=last"),
    (_TRAIN.replace("=new", "=file"), "'file'", "choose another hydra.run.dir"),
    (_TRAIN.replace("=new", "=/proc/here"), "/proc/here", "choose another hydra.run.dir"),
    # evaluate
    ("evaluate", "run", "give run="),
    ("evaluate run=missing", "run=missing does not exist", "give the folder"),
    ("evaluate run=folder", "no manifest.json", "give the folder"),
    (_EVAL + "graphs=true", "the target is on cpu", "use device=cuda"),
    (_TRAIN + "trainer=fsdp features.ahead=true", "this trainer shards it", "leave it out"),
    (_EVAL + "checkpoint=missing.ckpt", "no checkpoint at missing.ckpt", "name a file"),
    ("evaluate run={bad}/run-truncated limit=1", "last.ckpt cannot be read", "use another one"),
    ("evaluate run={bad}/run-nan limit=1", "fc.weight holds NaN", "earlier checkpoint"),
    ("evaluate run={bad}/run-no-json limit=1", "manifest.json is not JSON", "Restore"),
    (_EVAL + "temperature=-1", "temperature=-1", "choose 0 (greedy)"),
    (_EVAL + "temperature=hot", "temperature=hot is no number"),
    (_EVAL + "top_p=0", "top_p=0", "at most 1"),
    (_EVAL + "top_k=0", "top_k=0", "null"),
    (_EVAL + "min_p=2", "min_p=2", "0 keeps all"),
    (_EVAL + "repetition_penalty=0", "repetition_penalty=0", "1 is none"),
    (_EVAL + "batch=0", "batch=0", "at least one"),
    (_EVAL + "batch=1.5", "batch=1.5", "whole number"),
    ("evaluate run={run} max_new_tokens=0", "max_new_tokens=0", "at least one"),
    (_EVAL + "turns=second", "turns='second'", "first or all"),
    (_EVAL + "tree=oak", "tree/oak", "chain dynamic none sampled static"),
    (_EVAL + "tree.depth=0", "tree.depth=0", "tree=none"),
    (_EVAL + "tree=dynamic tree.budget=0", "tree.budget=0", "tree=none"),
    (_EVAL + "tree=dynamic tree.width=100000", "tree.width=100000", "at most 1,000"),
    (_EVAL + "tree=static tree.paths=[[0,1]]", "path [0, 1] has no parent", "add [0]"),
    (_EVAL + "tree=static tree.paths=[[9999999]]", "2048 tokens", "ranks below 2048"),
    (_EVAL + "tree=sampled tree.widths=[]", "tree.widths=[]", "such as [3, 2, 1]"),
    (_EVAL + "suite=unknown", "'unknown'", "mt_bench"),
    (_EVAL + "suite=gsm8k data.path=good.jsonl", "suite=gsm8k", "give one of the two"),
    (_EVAL + "data.path=book.jsonl", "no prompt left room", "100009 tokens of 2048"),
    (_EVAL + "telemetry=rounds.csv", "rounds.csv", ".jsonl or .parquet"),
    (_EVAL + "dtype=float17", "'float17' is unknown", "float32"),
    (_EVAL + "device=banana", "device=banana", "use cpu"),
    # generate
    (_GEN, "give one of prompt="),
    (_GEN + "prompt=''", "the prompt is empty", "give prompt="),
    (_GEN + "prompt=a color=purple", "color='purple'", "auto, always, never"),
    ("generate prompt=a", "who answers?", "run=DIR"),
    (_GEN + "data=prompts.jsonl", "needs out=FILE.jsonl"),
    (_GEN + "data=prompts.jsonl out=o.jsonl keep=some", "keep='some'", "ended, all"),
    (_GEN + "data=prompts.jsonl out=garbage", "out=garbage", "name it .jsonl"),
    (_GEN + "data=prompts.jsonl out=good.jsonl", "good.jsonl:1", "choose another out="),
    (_GEN + "data=twice.jsonl out=o.jsonl", "the id 'a'", "make it unique"),
    (_SERVER + "client.retries=0", "127.0.0.1:9", "is it running"),
    (_SERVER + "client.concurrency=0", "client.concurrency=0", "at least 1"),
    ("generate server=nonsense model=x data=prompts.jsonl out=o.jsonl", "server=nonsense", "http://localhost"),
    # cache
    ("cache data.limit=4", "out", "give out="),
    (_CACHE + "dtype=float17", "dtype='float17'", "bfloat16"),
    (_CACHE + "teacher=guess", "teacher='guess'", "feature, top_k"),
    (_CACHE + "variant=eagle teacher=top_k", "teacher=top_k", "variant=eagle3"),
    (_CACHE + "shard_mib=0", "shard_mib=0", "more than 0"),
    ("cache data.limit=4 data.val_limit=2 out=file", "out=file", "choose a folder"),
    ("cache data.limit=4 data.val_limit=2 out=folder", "out=folder holds x", "choose another folder"),
    ("cache verify store=folder", "folder holds no feature store", "eaglelab cache"),
    # plan
    ("plan devices=0", "devices=0", "at least one"),
    ("plan device_gib=-1", "device_gib=-1", "above 0"),
    ("plan target=hf", "target.source", "the shape.* of a target"),
    ("plan shape.hidden_size=64", "shape.num_layers is missing"),
    ("plan out=file/plan.json", "out=file/plan.json", "choose another file"),
    # compare, diff, report
    (_COMPARE + "variants=[eagel]", "'eagel'", "eagle, hass, eagle3"),
    (_COMPARE + "runs={{a:folder}} limit=1", "run=folder has no manifest.json", "give the folder"),
    (_COMPARE + "budget.unit=hours", "budget.unit='hours'", "rows, steps, flops, seconds"),
    (_COMPARE + "budget.value=0", "budget.value=0", "positive"),
    (_COMPARE + "seeds=[]", "seeds=[]", "at least one"),
    (_COMPARE + "trees=[oak]", "'oak'", "+shapes.oak="),
    (_COMPARE + "temperatures=[-1]", "temperature=-1", "choose 0"),
    (_COMPARE + "resamples=0", "resamples=0", "at least 100"),
    (_COMPARE + "suites=[nosuch]", "'nosuch'", "shipped are"),
    ("diff {run}", "1 given", "eaglelab diff RUN RUN"),
    ("diff {run} {run}", "twice", "give different folders"),
    ("diff {run} missing", "run=missing does not exist", "give the folder"),
    ("report", "give one of compare=DIR"),
    ("report compare=folder", "compare=folder holds no comparison.json", "give the folder"),
    ("report trees=damaged.parquet", "damaged.parquet: no readable Parquet", "write .jsonl"),
    ("report trees=broken.jsonl", "broken.jsonl, line 2", "remove the line"),
    ("report trees=keys.jsonl max_rounds=0", "max_rounds=0", "from 1 on"),
    # doctor, bench
    ("doctor", "give one of run=DIR"),
    ("doctor run={run} limit=1", "limit=1", "two conversations"),
    ("doctor run={run} depth=0", "depth=0", "at least one"),
    ("doctor run={run} out=folder", "out=folder is a folder", "choose another file"),
    ("doctor source=./missing target.source=bundled", "./missing does not exist", "give a folder"),
    ("bench variants=[eagel]", "'eagel'", "eagle, hass, eagle3"),
    ("bench steps=0", "steps=0", "at least one"),
    ("bench shape.num_heads=5", "shape.num_heads=5", "change one of them"),
    ("bench shape.length=0", "shape.length=0", "at least 1"),
    ("bench decoding run={run} 'trees=[{{name: nosuch}}]'", "tree='nosuch'", "choose one of"),
    ("bench decoding run={run} trees=[chain]", "trees: 'chain' is no tree", "{name: dynamic"),
    ("bench decoding run={run} repetitions=0", "repetitions=0", "at least 1"),
    ("bench rounds preset=70b", "preset/70b", "available: 1b 8b"),
    ("bench rounds network=eagle", "network=eagle", "fused or feature"),
    ("bench rounds network=feature draft_vocab_size=300", "draft_vocab_size=300", "all of the target's tokens"),
    ("bench rounds device=cuda", "device=cuda", "use cpu"),
    ("bench rounds acceptance=[6] trees=[{{name:chain,depth:5}}]", "6 tokens cannot be accepted", "a deeper tree"),
    ("bench rounds rounds=400", "rounds=400", "fewer rounds"),
    ("bench rounds trees=null", "trees=[]", "at least one"),
    ("bench rounds shape.num_heads=null", "shape.num_heads=None", "a whole number"),
    ("bench kernels soft_cross_entropy=5", "soft_cross_entropy=5", "single sizes"),
    (_TRAIN + "features.rows=few", "features.rows=few is no number", "default"),
    ("bench kernels device=cuda", "device=cuda", "use cpu"),
    ("bench kernels device=tpu", "device=tpu", "cpu or cuda"),
    ("bench kernels repetitions=0", "repetitions=0", "at least 1"),
    ("bench kernels soft_cross_entropy=null attention=null", "nothing is left to measure", "or attention"),
    ("bench kernels soft_cross_entropy.rows=0", "soft_cross_entropy.rows=0", "from 1 on"),
    ("bench kernels soft_cross_entropy.vocab_sizes=[8,-1]", "vocab_sizes=-1", "from 1 on"),
    ("bench kernels soft_cross_entropy.dtypes=int8", "'int8' is unknown", "float32"),
    ("bench kernels soft_cross_entropy.dtypes=[]", "no case is left", "and dtypes"),
    ("bench kernels attention.rows=0", "attention.rows=0", "from 1 on"),
    ("bench kernels attention.steps=[0,-1]", "attention.steps=-1", "from 0 on"),
    ("bench kernels attention.segments=[]", "attention: no case is left", "name segments"),
    ("bench kernels attention.segments=4096", "segments=4096", "between 1 and rows=2048"),
    ("bench kernels attention.groups=5", "heads=32", "a multiple of groups=5"),
    ("bench kernels out=folder", "out=folder is a folder", "choose another file"),
    ("tune run={run} tree=none", "tree=none", "name the tree to beat"),
    ("tune run={run} widths=[0]", "widths=[0]", "whole numbers >= 1"),
    ("tune run={run} floors=0.1", "floors=0.1 must be a list"),
    ("tune run={run} limit=100000", "limit=100000 takes them all", "leave some"),
    ("tune run={run} out=folder", "out=folder is a folder", "choose another file"),
    # import, export
    ("import source=./missing target.source=bundled out=in", "./missing does not exist", "give a folder"),
    ("import source=file target.source=bundled out=in", "source=file is a file", "give the folder"),
    ("import source=folder target.source=bundled out=in", "no config.json"),
    ("import source=folder target.source=bundled out=in taps=3", "taps=3", "a list"),
    ("export run={run} format=medusa out=ex", "medusa", "vllm"),
    ("export run={run} format=eagle dtype=int8 out=ex", "int8", "float32"),
    ("export run={run} format=eagle out=folder", "folder"),
    ("export run={bad}/run-nan format=eagle out=ex", "fc.weight holds NaN", "earlier checkpoint"),
]  # fmt: skip

_USUAL = set(f"{_TRAIN} {_DATA} {_EVAL}".split()[1:]) - {"evaluate", "train", "limit=1"}
CASES = [Case(arguments, tuple(says)) for arguments, *says in TABLE]
