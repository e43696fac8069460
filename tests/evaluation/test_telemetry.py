"""Round records: both file formats, interrupted writing, and totals against independent sums."""

import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from eaglelab.evaluation.calibration import Calibration
from eaglelab.evaluation.telemetry import (
    FIELDS,
    ParquetSink,
    log_to_wandb,
    open_sink,
    partial_name,
    read_records,
    summarize_rounds,
    telemetry_table,
)

both = pytest.mark.parametrize("suffix", ["jsonl", "parquet"])


def record(request=0, round=0, accepted=0, *, reached=None, depth=(1, 1, 2), batch=1, experts=True, **changes):
    """A round of a tree with two children of the root and one grandchild, under the first."""
    reached = accepted if reached is None else reached
    return {
        "request": request,
        "round": round,
        "batch": batch,
        "expanded": 9,
        "drafted": len(depth),
        "verified": len(depth) + 1,
        "accepted": accepted,
        "reached": reached,
        "published": accepted + 1,
        "published_tokens": list(range(accepted + 1)),
        "published_text": [*"ab", '"\n', "d"][: accepted + 1],
        "stop_reason": None,
        "draft_s": 0.25,
        "pack_s": 0.125,
        "verify_s": 0.5,
        "commit_s": 0.125,
        "target_kv_bytes": 4096,
        "draft_kv_bytes": 1024,
        "depth": list(depth),
        "confidence": [0.625, 0.25, 0.5][: len(depth)],
        "node_accepted": [reached >= 1, False, reached >= 2][: len(depth)],
        "experts_union": [4, 6] if experts else None,
        "experts_root": [2, 2] if experts else None,
        "root_token": 3,
        "root_text": " the",
        "node_token": [5, 6, 5][: len(depth)],
        "node_text": ["\N{EURO SIGN}", "", "<s>"][: len(depth)],
        "node_parent": [0, 0, 1][: len(depth)],
        "node_forwarded": [True, False, False][: len(depth)],
        "dropped_token": [8],
        "dropped_text": ["x"],
        "dropped_parent": [2],
        "dropped_confidence": [0.125],
        "prompt": "a question" if round == 0 else None,
        **changes,
    }


ODD = [
    record(0, 0, 2, stop_reason="eos"),
    record(0, 1, 0, depth=(), confidence=[], node_accepted=[], experts_union=[], experts_root=[]),
    record(1, 0, 0, drafted=0, experts=False) | dict.fromkeys(["depth", "confidence", "node_accepted"]),
    {**dict.fromkeys(FIELDS), "accepted": 0, "published": 1},
    record(2, 0, 1, confidence=[0.1, 1 / 3, 1e-30], draft_s=1e-9),
]


def randoms(count, seed=0):
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        reached = int(random.integers(0, 3))
        accepted = max(0, reached - int(random.integers(0, 2)))
        rows.append(
            record(
                number // 7,
                number % 7,
                accepted,
                reached=reached,
                batch=int(random.choice([1, 4])),
                confidence=random.random(3).tolist(),
                draft_s=float(random.random()),
                experts_union=random.integers(2, 9, 2).tolist(),
            )
        )
    return rows


# --- files ----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("group", [1, 2, 1024])
def test_round_trip(tmp_path, suffix, group):
    path = tmp_path / "new folder" / f"rounds.{suffix}"
    with open_sink(path, group=group) as sink:
        for row in ODD:
            sink.write(row)
    assert list(read_records(path)) == ODD
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@both
def test_no_records(tmp_path, suffix):
    path = tmp_path / f"rounds.{suffix}"
    open_sink(path).close()
    assert list(read_records(path)) == []


@both
def test_a_new_run_replaces_the_old_file(tmp_path, suffix):
    path = tmp_path / f"rounds.{suffix}"
    for rows in (ODD, ODD[:1]):
        with open_sink(path) as sink:
            for row in rows:
                sink.write(row)
        sink.close()  # twice is harmless
    assert list(read_records(path)) == ODD[:1]


@both
def test_other_fields_are_kept(tmp_path, suffix):
    path = tmp_path / f"rounds.{suffix}"
    rows = [record(temperature=None, tags=["a"]), record(temperature=0.5, tags=[])]
    with open_sink(path) as sink:
        for row in rows:
            sink.write(row)
    assert list(read_records(path)) == rows


def test_json_lines_are_there_at_once(tmp_path):
    path = tmp_path / "rounds.jsonl"
    with open_sink(path) as sink:
        for count, row in enumerate(ODD, start=1):
            sink.write(row)
            assert list(read_records(path)) == ODD[:count]


def test_parquet_has_row_groups_and_a_fixed_schema(tmp_path):
    path = tmp_path / "rounds.parquet"
    with open_sink(path, group=2) as sink:
        for row in [ODD[3], *ODD]:  # a first group of Nones fixes no types
            sink.write(row)
    file = pq.ParquetFile(path)
    assert file.num_row_groups == 3
    assert file.schema_arrow.names == list(FIELDS)
    assert str(file.schema_arrow.field("confidence").type) == "list<element: double>"
    assert list(read_records(path)) == [ODD[3], *ODD]


def test_parquet_takes_its_name_only_when_finished(tmp_path):
    path = tmp_path / "rounds.parquet"
    with open_sink(path) as sink:
        sink.write(ODD[0])
    sink = open_sink(path, group=1)
    sink.write(ODD[1])
    assert list(read_records(path)) == ODD[:1]  # still the old one, whole
    sink.close()
    assert list(read_records(path)) == ODD[1:2]
    with pytest.raises(AssertionError, match="closed"):
        sink.write(ODD[0])


@both
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_readable_records(tmp_path, suffix, error):
    path = tmp_path / f"rounds.{suffix}"

    def interrupted():
        with open_sink(path, group=2) as sink:
            for row in ODD[:3]:
                sink.write(row)
            raise error

    with pytest.raises(error):
        interrupted()
    if suffix == "parquet":
        with pytest.raises(ValueError, match="no such file; an unfinished one is .*parquet.partial"):
            read_records(path)
        path = partial_name(path)
    assert list(read_records(path)) == ODD[:3]


KILLED = """
import os, sys
from eaglelab.evaluation.telemetry import open_sink
sinks = [open_sink(path, group=2) for path in sys.argv[1:]]
for number in range(5):
    for sink in sinks:
        sink.write({"accepted": number, "published": number + 1})
os._exit(9)
"""


def test_a_killed_process(tmp_path):
    lines, parquet = tmp_path / "rounds.jsonl", tmp_path / "rounds.parquet"
    assert subprocess.run([sys.executable, "-c", KILLED, lines, parquet]).returncode == 9
    assert [row["accepted"] for row in read_records(lines)] == [0, 1, 2, 3, 4]
    assert not parquet.exists()
    with pytest.raises(ValueError, match=r"was killed .* write \.jsonl"):  # the format has its directory at the end
        list(read_records(partial_name(parquet)))


def test_a_line_cut_off_is_left_out_but_a_broken_one_is_not(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"accepted": 1}\n\n{"accepted": 2}\n{"accep')
    assert list(read_records(path)) == [{"accepted": 1}, {"accepted": 2}]
    path.write_text('{"accepted": 1}')
    assert list(read_records(path)) == [{"accepted": 1}]
    path.write_text('{"accepted": 1}\n{"accep\n{"accepted": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_records(path))


@pytest.mark.parametrize("name", ["rounds.csv", "rounds", "rounds.json", "rounds.csv.partial"])
def test_other_suffixes(tmp_path, name):
    for function in (open_sink, read_records):
        with pytest.raises(ValueError, match=r"\.jsonl .* \.parquet"):
            function(tmp_path / name)
    with pytest.raises(ValueError, match="no such file$"):
        read_records(tmp_path / "none.jsonl")


def test_values_that_do_not_fit_a_parquet_column(tmp_path):
    path = tmp_path / "rounds.parquet"
    sink = open_sink(path, group=1)
    sink.write(record())
    with pytest.raises(ValueError, match="field 'drafted' is to hold int64"):
        sink.write(record(drafted="many"))
    with pytest.raises(ValueError, match="field 'late' comes too late"):
        sink.write(record(late=1))
    sink.write(record(round=1))
    sink.close()
    assert list(read_records(path)) == [record(), record(round=1)]  # the bad ones are not there
    with pytest.raises(ValueError, match="'thing' is no Parquet column"):
        ParquetSink(path, group=1).write(record(thing=object()))


# --- totals ---------------------------------------------------------------------------------------


@both
def test_totals_against_independent_sums(tmp_path, suffix):
    rows, path = randoms(300), tmp_path / f"rounds.{suffix}"
    with open_sink(path, group=64) as sink:
        for row in rows:
            sink.write(row)
    summary = summarize_rounds(read_records(path), decode_s=1000.0)
    assert summary == summarize_rounds(rows, decode_s=1000.0)
    assert json.loads(json.dumps(summary)) == summary

    accepted = [row["accepted"] for row in rows]
    assert summary["tau"] == pytest.approx(np.mean(accepted) + 1)
    assert summary["tau"] == pytest.approx(1 + sum(level["cumulative"] for level in summary["by_depth"]))
    assert summary["rounds"] == 300
    assert summary["requests"] == 43
    assert summary["tokens"] == sum(accepted) + 300
    assert summary["nodes"] == {"expanded": 9, "retained": 3, "verified": 4}

    reached = np.array([row["reached"] for row in rows])
    first, second = summary["by_depth"]
    assert first["conditional"] == pytest.approx((reached >= 1).mean())
    assert second["conditional"] == pytest.approx((reached >= 2).sum() / (reached >= 1).sum())
    assert (second["rounds"], second["reached"]) == ((reached >= 1).sum(), (reached >= 2).sum())

    confidence = [value for row in rows for value in row["confidence"]]
    outcome = [value for row in rows for value in row["node_accepted"]]
    whole = Calibration.of(confidence, outcome)
    assert summary["calibration"]["nodes"] == 900
    assert summary["calibration"]["expected_error"] == pytest.approx(whole.expected_error)
    assert summary["calibration"]["brier"] == pytest.approx(np.mean((np.array(confidence) - outcome) ** 2))
    at_two = [(row["confidence"][2], row["node_accepted"][2]) for row in rows]
    assert second["nodes"] == 300
    assert second["confidence"] == pytest.approx(np.mean([p for p, _ in at_two]))
    assert second["acceptance"] == pytest.approx(np.mean([a for _, a in at_two]))

    draft = sum(row["draft_s"] for row in rows)
    assert summary["time"]["seconds"]["draft"] == pytest.approx(draft)
    assert summary["time"]["seconds"]["other"] == pytest.approx(1000 - draft - 300 * 0.75)
    assert sum(summary["time"]["split"].values()) == pytest.approx(1)

    unions = np.array([row["experts_union"] for row in rows])
    assert [layer["union"] for layer in summary["experts"]["layers"]] == pytest.approx(unions.mean(0))
    assert summary["experts"]["ratio"] == pytest.approx(unions.mean() / 2)

    for part in summary["batches"]:
        here = [row for row in rows if row["batch"] == part["batch"]]
        tokens = sum(row["published"] for row in here)
        assert (part["rounds"], part["tokens"]) == (len(here), tokens)
        assert part["tokens_per_s"] == pytest.approx(tokens / sum(row["draft_s"] + 0.75 for row in here))
        durations = [part["batch"] * (row["draft_s"] + 0.75) for row in here]
        assert part["round_s"]["mean"] == pytest.approx(np.mean(durations))
        assert part["round_s"]["p95"] == pytest.approx(np.quantile(durations, 0.95))


def test_depths_by_hand():
    rows = [
        record(0, 0, 2),
        record(0, 1, 1),
        record(0, 2, 0),
        record(0, 3, 1, reached=2, stop_reason="eos", published=1),  # the end token was drafted: level 2 is behind it
        record(1, 0, 1, depth=(1, 1)),  # nothing drafted at level 2
        record(1, 1, 0, depth=(), stop_reason="length"),  # a plain round
    ]
    summary = summarize_rounds(rows)
    first, second = summary["by_depth"]
    assert (first["cumulative"], second["cumulative"]) == (4 / 6, 1 / 6)
    assert (first["rounds"], first["reached"]) == (5, 4)
    assert first["conditional"] == 4 / 5
    assert (second["rounds"], second["reached"]) == (3, 2)
    assert second["conditional"] == 2 / 3
    assert (first["nodes"], second["nodes"]) == (10, 4)
    assert (first["acceptance"], second["acceptance"]) == (4 / 10, 2 / 4)
    assert first["confidence"] == pytest.approx((0.625 + 0.25) / 2)
    assert summary["tau"] == 1 + 5 / 6
    assert summary["stops"] == {"eos": 1, "length": 1}


def test_depths_without_a_list_of_nodes():
    """The tree's depth is unknown then: every accepted path might have gone on."""
    rows = [record(0, n, accepted) | dict.fromkeys(["depth", "confidence"]) for n, accepted in enumerate([3, 1, 0])]
    summary = summarize_rounds(rows)
    assert [level["conditional"] for level in summary["by_depth"]] == [2 / 3, 1 / 2, 1]
    assert [level["nodes"] for level in summary["by_depth"]] == [0, 0, 0]
    assert summary["calibration"]["nodes"] == 0
    some = summarize_rounds([record(depth=(1, 1, 2)) | {"depth": None}])
    assert some["calibration"]["nodes"] == 3  # counted, though of no known level


def test_latency_is_that_of_the_round_and_throughput_that_of_the_batch():
    """Two sequences in rounds of 4 s, then one of them alone in rounds of 1 s; each publishes 2 tokens a round."""
    half = {f"{phase}_s": 0.5 for phase in ("draft", "pack", "verify", "commit")}
    alone = {f"{phase}_s": 0.25 for phase in ("draft", "pack", "verify", "commit")}
    rows = [record(request, n, 1, batch=2, **half) for n in range(3) for request in (0, 1)]
    rows += [record(1, n, 1, batch=1, **alone) for n in (3, 4)] + [record(2, 0, 1, batch=1, **alone)]
    one, two = summarize_rounds(rows)["batches"]
    assert (one["tokens_per_s"], two["tokens_per_s"]) == (6 / 3, 12 / 12)
    assert (one["round_s"]["median"], two["round_s"]["median"]) == (1, 4)
    assert one["request_s"] == {"mean": 1, "median": 1, "p95": 1}
    assert two["request_s"]["mean"] == (12 + 14) / 2


def test_memory_and_missing_values():
    rows = [record(target_kv_bytes=10, draft_kv_bytes=None), record(target_kv_bytes=30), record(pack_s=None)]
    summary = summarize_rounds(rows)
    assert summary["kv_bytes"]["target"] == {"mean": (40 + 4096) / 3, "max": 4096}
    assert summary["kv_bytes"]["draft"] == {"mean": 1024, "max": 1024}
    assert summary["time"]["seconds"]["pack"] == 0.25
    assert summary["time"]["seconds"]["other"] is summary["time"]["split"]["other"] is None
    bare = summarize_rounds([{"accepted": 2, "published": 3}])
    assert bare["tau"] == 3
    assert bare["nodes"] == {"expanded": None, "retained": None, "verified": None}
    assert bare["experts"] is None
    assert bare["batches"] == []
    assert bare["time"]["seconds"]["draft"] is None


def test_nothing_to_sum_up():
    summary = summarize_rounds([])
    assert summary["tau"] is None
    assert summary["rounds"] == summary["calibration"]["nodes"] == 0
    assert summary["by_depth"] == summary["batches"] == []
    assert "-" in telemetry_table(summary)


def test_many_nodes_are_settled_in_parts():
    rows = [record(0, n, n % 3) for n in range(40_000)]
    summary = summarize_rounds(rows)
    assert summary["calibration"]["nodes"] == 120_000
    assert summary["by_depth"][1]["acceptance"] == pytest.approx(13_333 / 40_000)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"drafted": 3}, r"record 1 .* has no `accepted`"),
        (record(5, 6, confidence=[0.5]), r"request 5, round 6\): 1 confidences, 3 outcomes and 3 depths"),
        (record(experts_union=[1], experts_root=[1]), "experts of 1 mixture layers, of 2"),
        (record(experts_root=None), "experts of 0 mixture layers, of 2"),
    ],
)
def test_records_that_do_not_fit(broken, complaint):
    with pytest.raises(ValueError, match=complaint):
        summarize_rounds([record(), broken])


# --- showing --------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self):
        self.logged = []

    def log(self, values):
        self.logged.append(values)


def test_wandb_scalars():
    run = FakeRun()
    scalars = log_to_wandb(summarize_rounds(randoms(50)), run)
    assert run.logged == [scalars]
    assert all(type(value) in (int, float) for value in scalars.values())
    for name in (
        "decode/tau",
        "decode/by_depth/depth_2/conditional",
        "decode/batches/batch_4/round_s/p95",
        "decode/experts/layers/layer_1/union",
        "decode/calibration/reliability/bin_3/interval/1",
        "decode/kv_bytes/draft/max",
        "decode/time/split/verify",
    ):
        assert name in scalars
    assert "decode/time/split/other" not in scalars  # None: not measured


def test_table():
    rows = randoms(400)
    rows[-1]["stop_reason"] = "eos"
    text = telemetry_table(summarize_rounds(rows, decode_s=1000.0), "a run")
    lines = text.splitlines()
    assert lines[0] == "a run"
    assert max(map(len, lines)) <= 80
    for words in (
        "tau",
        "ended by eos 1",
        "other",
        "ECE",
        "Brier",
        "4.0 KiB",
        "root row alone 2.00, ratio 2.",
        "draft confidence against",
    ):
        assert words in text
    assert sum(line.startswith("0.") and " to " in line for line in lines) == 10
    depth = lines.index(next(line for line in lines if line.startswith("acceptance by depth")))
    assert lines[depth + 2].split()[0] == "1"


def test_table_of_bare_records_has_no_empty_parts():
    text = telemetry_table(summarize_rounds([{"accepted": 0, "published": 1}]))
    for words in ("depth", "mixture", "batch", "interval"):
        assert words not in text
    assert "None" not in text
