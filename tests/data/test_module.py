"""The data module: report, splits, order, and exact resume under Lightning."""

import json
import random
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from eaglelab.data import (
    Conversation,
    ConversationDataModule,
    PackedRows,
    RowLoader,
    epoch_batches,
    epoch_order,
    hold_out,
)


def conversations(count, answer="the answer is {i}."):
    return [
        Conversation(
            str(i),
            (
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": answer.format(i=i) + "." * (i % 7)},
            ),
        )
        for i in range(count)
    ]


def make_data(tokenizer, count=22, **changes):
    options = {"packing": False, "max_length": 80, "batch_size": 2, "seed": 3}
    return ConversationDataModule(tokenizer, conversations(count), **(options | changes))


class Recorder(L.LightningModule):
    """Remembers the batches of every optimizer step; can be interrupted inside a step."""

    def __init__(self, interrupt_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.interrupt_at = [], interrupt_at

    def training_step(self, batch, batch_idx):
        if self.interrupt_at == len(self.seen):
            raise KeyboardInterrupt
        self.seen.append(batch.tokens_BS.tolist())
        return self.weight * batch.supervised

    def validation_step(self, batch, batch_idx):
        assert batch.supervised

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEveryBatch(L.Callback):
    """A checkpoint after every batch, the last of an epoch included, and on interruption."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    def on_train_batch_end(self, trainer, *_):
        self.count += 1
        trainer.save_checkpoint(self.folder / f"{self.count}.ckpt")

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint(self.folder / "interrupted.ckpt")


def fit(data, *callbacks, resume=None, model=None, **options):
    model = model or Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model.seen


def flat(batches):
    return sorted(json.dumps([t for t in row if t]) for batch in batches for row in batch)


pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


# 22 rows, batches of 2: 11 batches per epoch
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_steps": 29},
        {"max_steps": 27, "val_check_interval": 4},
        {"max_epochs": 3, "accumulate_grad_batches": 2},
        {"max_epochs": 4, "limit_train_batches": 5},
    ],
    ids=["epochs", "steps", "validation", "accumulation", "limit"],
)
def test_resume_continues_with_the_next_batch(chatml, tmp_path, options, workers):
    """From a checkpoint after any batch k: exactly the batches k + 1, k + 2, ... of the whole run."""
    val = conversations(4) if "val_check_interval" in options else None
    whole = fit(make_data(chatml, val=val, num_workers=workers), SaveEveryBatch(tmp_path), **options)
    size = options.get("limit_train_batches", 11)
    assert len(whole) > 2 * size
    points = {0: [1, size - 1, size, size + 1, 2 * size, len(whole) - 1], 2: [3, size, size + 2]}[workers]
    for k in points:
        data = make_data(chatml, val=val, num_workers=workers)
        resumed = fit(data, resume=tmp_path / f"{k}.ckpt", **options)
        assert resumed == whole[k:], f"resumed after batch {k}"


@pytest.mark.parametrize("validate", [False, True])
def test_resume_from_an_end_of_epoch_checkpoint(chatml, tmp_path, validate):
    """Lightning's own ModelCheckpoint saves later in the epoch's end than a batch hook does."""
    val = conversations(4) if validate else None
    save = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1)
    whole = fit(make_data(chatml, val=val), save, max_epochs=3)
    assert len(whole) == 33
    for epoch in (0, 1):
        resumed = fit(make_data(chatml, val=val), resume=tmp_path / f"epoch={epoch}.ckpt", max_epochs=3)
        assert resumed == whole[11 * (epoch + 1) :]


def test_longer_run_from_a_finished_one(chatml, tmp_path):
    whole = fit(make_data(chatml), max_epochs=4)
    fit(make_data(chatml), SaveEveryBatch(tmp_path), max_steps=22)
    assert fit(make_data(chatml), resume=tmp_path / "22.ckpt", max_steps=44) == whole[22:]


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_interrupted_inside_its_step_is_repeated(chatml, tmp_path, workers):
    """It was delivered but not learned from."""
    whole = fit(make_data(chatml), max_epochs=2)
    stopped = Recorder(interrupt_at=15)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(make_data(chatml, num_workers=workers), SaveEveryBatch(tmp_path), model=stopped, max_epochs=2)
    resumed = fit(make_data(chatml), resume=tmp_path / "interrupted.ckpt", max_epochs=2)
    assert stopped.seen + resumed == whole


def test_epochs_hold_every_row_once_in_new_order(chatml):
    data = make_data(chatml)
    whole = fit(data, max_epochs=2)
    first, second = whole[:11], whole[11:]
    assert flat(first) == flat(second)
    assert first != second
    assert fit(make_data(chatml, seed=4), max_epochs=1) != first
    assert flat(first) == sorted(json.dumps(data.train_rows[i].tokens_S.tolist()) for i in range(22))


def test_overfitting_repeats_its_batches(chatml):
    seen = fit(make_data(chatml), max_epochs=3, overfit_batches=2)
    assert seen == seen[:2] * 3


def test_order_ignores_and_leaves_global_random_streams(chatml):
    def batches(seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        data = make_data(chatml, num_workers=1)
        data.setup()
        seen = [batch.tokens_BS.tolist() for batch in data.train_dataloader()]
        assert before == (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
        return seen

    assert batches(0) == batches(1)


@pytest.mark.parametrize("change", [{"seed": 4}, {"batch_size": 3}, {"count": 21}, {"max_length": 30}])
def test_resume_refuses_another_order(chatml, tmp_path, change):
    fit(make_data(chatml), SaveEveryBatch(tmp_path), max_steps=3)
    if "max_length" in change:
        change = {**change, "overlength": "truncate"}
    field = {"seed": "seed", "batch_size": "rows_per_batch"}.get(next(iter(change)), "data")
    with pytest.raises(ValueError, match=rf"cannot continue .*: {field} is .* here and .* start a new run"):
        fit(make_data(chatml, **change), resume=tmp_path / "3.ckpt", max_steps=5)


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 5),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 99),
)
def test_processes_share_an_epoch(count, batch_size, world_size, seed, epoch):
    """The global batches of one process with the larger batch, each dealt out as evenly as it goes."""
    order_N = epoch_order(seed, epoch, count)
    assert sorted(order_N) == list(range(count))
    assert order_N.tolist() == epoch_order(seed, epoch, count).tolist()
    plans = [epoch_batches(order_N, batch_size, rank, world_size) for rank in range(world_size)]
    (alone,) = [epoch_batches(order_N, batch_size * world_size)]
    assert {len(plan) for plan in plans} == {len(alone)}
    for number, whole in enumerate(alone):
        dealt = [plan[number] for plan in plans]
        assert [row for own in dealt for row in own if row >= 0] == whole
        sizes = [sum(row >= 0 for row in own) for own in dealt]
        assert max(sizes) - min(sizes) <= 1
        assert all(size or own == [~whole[0]] for size, own in zip(sizes, dealt))
    stops = np.arange(1, count + 1)
    rows = PackedRows(np.zeros(count, np.int32), np.zeros(count, np.bool_), stops, stops)
    loader = RowLoader(rows, batch_size=batch_size, seed=seed, rank=0, world_size=world_size)
    assert len(loader) == len(loader.plan(epoch)) == len(plans[0])
    assert loader.plan(epoch) == plans[0]


def test_a_process_without_rows_gets_one_without_supervision(chatml):
    data = make_data(chatml, count=5)
    data.setup()
    loaders = [RowLoader(data.train_rows, batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    full, rest = zip(*loaders, strict=True)
    assert [len(batch.tokens_BS) for batch in full] == [2, 2]
    first, second = rest
    assert first.tokens_BS.equal(second.tokens_BS)
    assert first.supervised > 0 == second.supervised


def test_order_is_pinned():
    """A changed order would silently break the resume of old runs."""
    assert epoch_order(0, 0, 8).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert epoch_order(1, 2, 8).tolist() == [7, 1, 3, 0, 4, 2, 6, 5]


def test_start_in_the_middle(chatml):
    data = make_data(chatml)
    data.setup()
    loader = data.train_dataloader()
    whole = [batch.tokens_BS.tolist() for batch in loader.batches(5)]
    assert [batch.tokens_BS.tolist() for batch in loader.batches(5, 4)] == whole[4:]
    assert list(loader.batches(5, len(loader))) == []


def test_report(chatml, caplog):
    chats = conversations(9)
    chats += [
        Conversation("no answer text", chats[0].messages[:1]),
        Conversation("long", (chats[0].messages[0], {"role": "assistant", "content": "x" * 100})),
    ]
    data = ConversationDataModule(chatml, chats, max_length=60, row_length=128, batch_size=2)
    with caplog.at_level("INFO"):
        data.setup("fit")
        data.setup("validate")
    report = data.report.train
    assert (report.read, report.kept, report.truncated) == (11, 9, 0)
    assert report.dropped == {"too_long": 1, "no_supervised_row": 1}
    assert report.rows == len(data.train_rows) == len(data.train_rows.row_stops_N)
    assert report.tokens == len(data.train_rows.tokens_T)
    assert report.answer_tokens == int(data.train_rows.answer_T.sum())
    batches = list(data.train_dataloader())
    assert report.supervised_rows == sum(batch.supervised for batch in batches)
    padding = torch.cat([~batch.valid_BS for batch in batches]).double().mean().item()
    assert report.padding_share == pytest.approx(padding)
    assert all(batch.tokens_BS.shape[1] == 128 for batch in batches)
    assert json.loads(json.dumps(data.report.to_dict()))["train"]["dropped"]["too_long"] == 1
    assert [record.message for record in caplog.records if "eaglelab" in record.name] == [str(data.report)]
    assert "9 of 11 conversations, 1 no supervised row, 1 too long;" in str(data.report)
    assert "\n" not in str(data.report)


def test_nothing_left_is_an_error(chatml):
    data = make_data(chatml, max_length=10)
    with pytest.raises(ValueError, match=r"left in the train data \(22 too_long; max_length=10.*truncate"):
        data.setup()


def test_tokenization_errors_name_the_conversation(make_tokenizer):
    with pytest.raises(ValueError, match=r"conversation 0: .*no chat template"):
        make_data(make_tokenizer(None)).setup()


def test_chat_template_file(make_tokenizer, chatml, tmp_path):
    file = Path(tmp_path) / "chat.jinja"
    file.write_text(chatml.chat_template)
    replaced, own = make_data(make_tokenizer(None), chat_template=file), make_data(chatml)
    replaced.setup()
    own.setup()
    assert replaced.train_rows.digest == own.train_rows.digest


def test_files_limits_and_validation_file(chatml, tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [json.dumps({"question": f"q{i}", "answer": "a"}) for i in range(9)]
    file.write_text("\n".join(rows))
    data = ConversationDataModule(chatml, str(file), [file], limit=7, val_limit=2, packing=False, max_length=64)
    data.setup()
    assert (data.report.train.read, data.report.val.read) == (7, 2)
    in_file_order = [row for batch in data.val_dataloader() for row in batch.tokens_BS.tolist()]
    assert flat([in_file_order]) == flat([[data.val_rows[i].tokens_S.tolist() for i in range(2)]])
    assert make_data(chatml).val_fraction == 0
    data = make_data(chatml)
    data.setup()
    assert data.val_dataloader() == []
    assert data.report.val is None


def test_held_out_conversations(chatml):
    chats = conversations(200)
    train, val = hold_out(chats, 0.1)
    assert len(val) == 20
    assert {c.id for c in train}.isdisjoint(c.id for c in val)
    assert len(train) == 180
    shuffled = chats[::-1]
    assert {c.id for c in hold_out(shuffled, 0.1)[1]} == {c.id for c in val}
    twice = chats + [Conversation(f"again {c.id}", c.messages) for c in chats]
    train, val = hold_out(twice, 0.1)
    assert {c.messages[0]["content"] for c in train}.isdisjoint(c.messages[0]["content"] for c in val)
    train, val = hold_out(chats[:2], 0.01)
    assert len(train) == len(val) == 1
    train, val = hold_out(chats[:3], 0.99)
    assert len(train) == 1
    with pytest.raises(ValueError, match="at least two different prompts, the data has 1"):
        hold_out([chats[0]] * 3, 0.1)
    data = make_data(chatml, count=200, val_fraction=0.1)
    data.setup()
    assert (data.report.train.read, data.report.val.read) == (180, 20)
    data = make_data(chatml, count=200, val_fraction=0.1, val_limit=5)
    data.setup()
    assert (data.report.train.read, data.report.val.read) == (195, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 makes no batch"),
        ({"val_fraction": 1.0}, r"val_fraction=1.0 must be in \[0, 1\)"),
        ({"packing": True, "row_length": 40}, "row_length=40 is shorter than max_length=80"),
    ],
)
def test_bad_options(chatml, options, message):
    with pytest.raises(ValueError, match=message):
        make_data(chatml, **options)


class PerRank(L.Callback):
    """Writes what this process saw."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, module):
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(module.seen))


@pytest.mark.slow
def test_two_processes(chatml, tmp_path):
    """Two real processes: disjoint rows, equal counts, exact resume in the second epoch."""
    ddp = {"strategy": "ddp_spawn", "devices": 2, "max_epochs": 3}

    def run(name, **options):
        folder = tmp_path / name
        folder.mkdir()
        fit(make_data(chatml, count=23), PerRank(folder), **ddp, **options)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]

    fit(make_data(chatml, count=23), SaveEveryBatch(tmp_path), **ddp)
    whole = run("whole")
    assert [len(seen) for seen in whole] == [18, 18]
    rows = [set(flat(seen[:6])) for seen in whole]
    assert [len(own) for own in rows] == [12, 11]
    assert rows[0].isdisjoint(rows[1])
    assert run("resumed", resume=tmp_path / "8.ckpt") == [seen[8:] for seen in whole]
