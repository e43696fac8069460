"""Recorded rounds decide what launched ones do.

There is no CUDA on a test machine. What makes recordings wrong is mostly no matter of CUDA: a length or a mask that
Python computed at the first call and that stays in the recording. The recorder here repeats tensor operations alone, so
it is wrong in the same cases.
"""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from eaglelab.decoding import Chain, DynamicTree, Engine, Sampling, StaticTree
from eaglelab.kernels.recording import Recordings, cuda_graph
from eaglelab.target import FrozenTarget
from tests.decoding.test_exactness import network_drafter
from tests.oracles.scripted import tiny_llama
from tests.oracles.traced import traced

PROMPTS = [[7, 3, 5], [9, 4], [1, 2, 3, 4, 5, 6]]
TREES = {"none": None, "chain": Chain(3), "static": StaticTree(), "dynamic": DynamicTree(3, 3, 7)}


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(23, layers=3))


def engines(target, tree, kind):
    """Launched and recorded."""
    for recorded in (False, True):
        drafter = None if TREES[tree] is None else network_drafter(target, kind)
        yield Engine(target, drafter, TREES[tree], graphs=recorded and Recordings(traced))


def check(launched, recorded, batch, sampling=None, prompts=PROMPTS):
    settings = {"max_new_tokens": 14, "stop_ids": set(), "batch": batch, "sampling": sampling}
    expected, found = (engine.generate(prompts, **settings) for engine in (launched, recorded))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.accepted for one in found] == [one.accepted for one in expected]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("tree", "kind"),
    [("none", "feature"), ("chain", "feature"), ("static", "feature"), ("dynamic", "feature"), ("dynamic", "fused")],
)
def test_recorded_rounds_decide_the_same(target, tree, kind, batch):
    """Acceptance too: text alone would be right with any trees."""
    launched, recorded = engines(target, tree, kind)
    check(launched, recorded, batch)
    assert len(recorded.recordings) == (1 if tree == "none" else 2)  # verification, and the tree


def test_so_do_sampled_ones(target):
    launched, recorded = engines(target, "dynamic", "feature")
    check(launched, recorded, 3, Sampling(temperature=0.8, seed=4))
    assert len(recorded.recordings) == 2


def test_a_recording_serves_the_prompts_that_come_later(target):
    """Its buffers are kept when a batch has ended; nothing of the prompts before is left in them."""
    launched, recorded = engines(target, "dynamic", "feature")
    check(launched, recorded, 1)
    before = len(recorded.recordings)
    check(launched, recorded, 1, prompts=[[2, 2, 8], [11]])
    assert len(recorded.recordings) == before == 2


def test_slots_of_another_size_go_with_their_recordings(target):
    """A recording keeps the slots that it is of: recordings of all sizes would fill the memory."""
    engine = list(engines(target, "dynamic", "feature"))[1]
    for prompts, batch in ((PROMPTS, 1), (PROMPTS, 3), ([[1] * 300], 1), (PROMPTS[:1], 1)):
        engine.generate(prompts, max_new_tokens=8, stop_ids=set(), batch=batch)
    assert len(engine.recordings) == 2
    found = engine._spare[0]
    assert (found.room, found.capacity) == (1, 512), "somewhat larger slots are used again"


def test_an_interrupt_leaves_the_slots_to_the_next_generation(target):
    made = []
    recordings = Recordings(lambda function: made.append(None) or traced(function))
    engine = Engine(target, network_drafter(target, "feature"), TREES["dynamic"], graphs=recordings)

    def interrupt(records):
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, max_new_tokens=14, stop_ids=set(), batch=3, on_round=interrupt)
    check(Engine(target, network_drafter(target, "feature"), TREES["dynamic"]), engine, 3)
    assert len(made) == 2


def test_slots_that_are_used_again_need_no_further_memory(target):
    engine = list(engines(target, "chain", "feature"))[1]
    engine.generate(PROMPTS, max_new_tokens=8, batch=1)
    engine.max_kv_bytes = 1  # what the first batch took is not free any more
    engine.generate(PROMPTS, max_new_tokens=8, batch=1)
    with pytest.raises(ValueError, match="key/value slots"):
        engine.generate(PROMPTS, max_new_tokens=8, batch=2)
    assert len(engine.recordings) == 0, "the first batch's slots made room"


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_a_rounds_nodes_stay_when_the_next_one_is_replayed(target, tree):
    """Telemetry reads them when the generation has ended."""
    found = []
    for graphs in (False, Recordings(traced)):
        engine = Engine(target, network_drafter(target, "feature"), TREES[tree], record_nodes=True, graphs=graphs)
        result = engine.generate_one(PROMPTS[0], max_new_tokens=14, stop_ids=set())
        found.append([record.nodes.to_dict() for record in result.rounds])
    launched, recorded = found
    assert len(launched) == len(recorded) > 3
    for one, other in zip(launched, recorded, strict=True):
        for name in ("confidence", "dropped_confidence"):
            assert other.pop(name) == pytest.approx(one.pop(name), rel=1e-2)
        assert other == one


def test_slots_that_are_given_up_are_not_held(target):
    """Another capacity: the recordings of the old slots go, and their memory with them."""
    engine = Engine(target, network_drafter(target, "feature"), Chain(3), graphs=Recordings(traced))
    engine.generate(PROMPTS[:1], max_new_tokens=6, stop_ids=set())
    slots = weakref.ref(engine._spare[0])
    engine.capacity = 512
    engine.generate(PROMPTS[:1], max_new_tokens=6, stop_ids=set())
    gc.collect()
    assert slots() is None
    assert len(engine.recordings) == 2


def test_what_cannot_be_recorded_runs_launch_by_launch(target):
    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    launched, recorded = engines(target, "dynamic", "feature")
    recorded.recordings = Recordings(refuse)
    with pytest.warns(UserWarning, match="launch by launch: RuntimeError: operation not permitted"):
        check(launched, recorded, 1)


@pytest.mark.parametrize("tree", [DynamicTree(3, 3, 7, floor=0.2)], ids=["floor"])
def test_trees_that_ask_the_host_are_not_recorded(target, tree):
    engine = Engine(target, network_drafter(target, "feature"), tree, graphs=Recordings(traced))
    check(Engine(target, network_drafter(target, "feature"), tree), engine, 1)
    assert len(engine.recordings) <= 1  # verification, where no node was cut


def test_without_cuda_graphs_are_refused(target):
    with pytest.raises(ValueError, match="the target is on cpu; use device=cuda"):
        Engine(target, graphs=True)
    with pytest.raises(ValueError, match="choose one"):
        Engine(target, graphs=True, compile=True)


def test_recordings_are_by_key_and_shape_and_the_oldest_goes():
    calls = []

    def twice(x):
        calls.append(tuple(x.shape))
        return x * 2

    recordings = Recordings(traced, most=2)
    for length, value in ((3, 1.0), (3, 2.0), (4, 3.0), (3, 4.0), (5, 5.0), (4, 6.0)):
        x = torch.full((length,), value)
        assert torch.equal(recordings.call("a", twice, x), 2 * x)
    assert calls == [(3,), (3,), (4,), (4,), (5,), (5,), (4,), (4,)]  # each recording runs it twice; 4 came again
    assert len(recordings) == 2


def test_a_recording_that_fails_leaves_the_stream(monkeypatch):
    """`torch.cuda.graph` leaves its own stream current where ending the recording raises."""

    class Stream:
        def wait_stream(self, other):
            pass

    now = [Stream()]
    first = now[0]

    @contextmanager
    def stream(one):
        before, now[0] = now[0], one
        yield
        now[0] = before

    class Graph:
        def __init__(self, _):
            pass

        def __enter__(self):
            now[0] = Stream()

        def __exit__(self, *_):
            raise RuntimeError("operation failed due to a previous error during capture")

    for name, one in {"Stream": Stream, "stream": stream, "CUDAGraph": object, "graph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda one: now.__setitem__(0, one))
    with pytest.raises(RuntimeError, match="previous error"):
        cuda_graph(lambda: None)
    assert now == [first]


def test_recordings_are_made_on_the_device_of_their_inputs(monkeypatch):
    """Streams are of the present device; on another one a recording would hold nothing, and replay nothing."""
    asked, device_of = [], torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: asked.append(tuple(x.shape)) or device_of(x))
    Recordings(traced).call("a", lambda nothing, x: x + 1, None, torch.zeros(3))
    assert asked == [(3,)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tree", ["none", "chain", "static", "dynamic"])
def test_on_a_gpu(tree):
    target = FrozenTarget(tiny_llama(23, layers=3))
    target.to("cuda")
    drafter = None if TREES[tree] is None else network_drafter(target, "feature")
    recorded = Engine(target, drafter, TREES[tree], graphs=True)
    check(Engine(target, drafter, TREES[tree]), recorded, 1)
    check(Engine(target, drafter, TREES[tree]), recorded, 3)
    assert len(recorded.recordings) >= 1
