"""Sampling: the library's distribution, one draw per output place, whatever tree or batch."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, SuppressTokensLogitsProcessor

from eaglelab.decoding import Chain, DynamicTree, Engine, Sampling, StaticTree
from eaglelab.decoding.sampling import choose, distribution, processed, warp_drafts
from eaglelab.decoding.tree import Topology, Tree, root_only
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import ScriptDrafter, drafts, full_logits, tiny_llama

VOCAB = 61
TREES = {"chain": Chain(4), "static": StaticTree(), "dynamic": DynamicTree(width=4, depth=4, budget=12)}
PROMPTS = [
    torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 3, 14, 1, 6, 11)
]
SETTINGS = {
    "plain": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.5),
    "hot_top_k": Sampling(temperature=1.5, top_k=7),
    "top_p": Sampling(temperature=0.8, top_p=0.7),
    "min_p": Sampling(temperature=1.2, min_p=0.05),
    "all": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.4),
    "greedy_penalty": Sampling(repetition_penalty=1.6),
    "processor": Sampling(temperature=0.7, processors=(SuppressTokensLogitsProcessor([3, 5], device="cpu"),)),
}


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(VOCAB))


def library_scores(model, prompt, one, steps):
    """The tokens that the library sampled, and its processed scores for each of them."""
    keep = {"top_k": one.top_k or 0, "top_p": one.top_p, "min_p": one.min_p or None}
    config = GenerationConfig(
        max_new_tokens=steps,
        do_sample=not one.greedy,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        repetition_penalty=one.repetition_penalty,
        **({"temperature": one.temperature, **keep} if not one.greedy else {}),
    )
    torch.manual_seed(0)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        logits_processor=LogitsProcessorList(one.processors),
    )
    return out.sequences[0].tolist(), torch.cat(out.scores)


@pytest.mark.parametrize("name", SETTINGS)
def test_processed_scores_are_the_librarys(target, name):
    """Every setting along a whole sampled text, rows of a chain: same order of processors, same contexts."""
    one, steps = SETTINGS[name], 12
    for prompt in PROMPTS[:4]:
        text, expected_NV = library_scores(target.model, prompt, one, steps)
        n = len(prompt)
        logits_RV = torch.stack([full_logits(target.model)(tuple(text[: n + k])) for k in range(steps)])
        parents = torch.arange(steps - 1)[None]
        nodes = torch.tensor([text[n : n + steps - 1]])
        flat = Tree(nodes, torch.zeros(nodes.shape), Topology.from_parents(parents, steps)).flatten(
            torch.tensor([[text[n - 1]]])
        )
        got_BRV = processed(logits_RV[None], flat, [one], [text[: n - 1]])
        torch.testing.assert_close(got_BRV[0], expected_NV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["perfect", "noisy", "wrong"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_text_is_that_of_plain_sampling(target, name, tree, kind):
    """A draw belongs to an output place, so a deterministic tree cannot change the text, only the rounds."""
    one = SETTINGS[name]
    plain = Engine(target).generate(PROMPTS, max_new_tokens=15, stop_ids=set(), sampling=one)
    predict = drafts(kind, target.model, VOCAB)
    drafter = ScriptDrafter(predict, [prompt[0] for prompt in PROMPTS])
    drafted = Engine(target, drafter, TREES[tree]).generate(PROMPTS, max_new_tokens=15, stop_ids=set(), sampling=one)
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    if kind == "perfect":
        assert sum(sum(result.accepted) for result in drafted) > 0


def test_one_seed_one_text(target):
    engine, one = Engine(target), Sampling(temperature=1.0, seed=5)
    first = engine.generate_one(PROMPTS[0], max_new_tokens=20, stop_ids=set(), sampling=one)
    again = engine.generate_one(PROMPTS[0], max_new_tokens=20, stop_ids=set(), sampling=one)
    other = engine.generate_one(
        PROMPTS[0], max_new_tokens=20, stop_ids=set(), sampling=Sampling(temperature=1.0, seed=6)
    )
    assert first.tokens == again.tokens != other.tokens
    longer = engine.generate_one(PROMPTS[0], max_new_tokens=200, stop_ids=set(), sampling=one)
    assert longer.tokens[:20] == first.tokens, "the limit must not move the draws"
    twins = engine.generate([PROMPTS[0]] * 2, max_new_tokens=20, stop_ids=set(), sampling=one)
    assert twins[0].tokens == first.tokens, "prompt i has the seed + i"
    assert twins[1].tokens == other.tokens


class Scribble(LogitsProcessor):
    """Writes into its argument, as some processors do."""

    def __call__(self, input_ids, scores):
        scores.scatter_(1, input_ids[:, -1:], -float("inf"))
        return scores


def test_a_processor_that_writes_into_its_argument_spoils_nothing(target):
    one = Sampling(processors=(Scribble(),))
    plain = Engine(target).generate(PROMPTS, max_new_tokens=12, stop_ids=set(), sampling=one)
    drafter = ScriptDrafter(drafts("noisy", target.model, VOCAB), [prompt[0] for prompt in PROMPTS])
    drafted = Engine(target, drafter, StaticTree()).generate(PROMPTS, max_new_tokens=12, stop_ids=set(), sampling=one)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    for result in plain:
        assert all(a != b for a, b in zip(result.tokens, result.tokens[1:], strict=False))


def test_requests_of_one_batch_keep_their_own_settings():
    torch.manual_seed(0)
    logits_BRV = torch.randn(4, 1, 50)
    flat = root_only(torch.zeros(4, 1, dtype=torch.int64))
    settings = [Sampling(), Sampling(temperature=2.0), Sampling(temperature=0.5, top_k=3), Sampling(temperature=2.0)]
    together = distribution(processed(logits_BRV, flat, settings, [[]] * 4), settings)
    for b, one in enumerate(settings):
        alone = distribution(processed(logits_BRV[b : b + 1], root_only(flat.tokens_BR[:1]), [one], [[]]), [one])
        torch.testing.assert_close(together[b : b + 1], alone)
    assert together[0].max() == 1
    assert (together[2] > 0).sum() == 3
    log_p = logits_BRV.log_softmax(-1)
    torch.testing.assert_close(warp_drafts(log_p, settings)[0], log_p[0], msg="greedy requests draft at T = 1")


def test_nan_is_never_a_token(target):
    scores = torch.randn(1, 1, VOCAB)
    scores[0, 0, 7] = float("nan")
    flat = root_only(torch.zeros(1, 1, dtype=torch.int64))
    assert choose(scores, flat, [Sampling()], None).tolist() == [[-1]]
    assert choose(scores, flat, [Sampling(temperature=1.0)], torch.zeros(1, 1, dtype=torch.float64)).tolist() == [[-1]]
    engine = Engine(target)
    state = engine.start([PROMPTS[0]], max_new_tokens=9, stop_ids=set())
    before = list(state.requests[0].tokens)
    poison = Sampling(processors=(lambda ids, scores: scores * float("nan"),))
    state.requests[0].sampling, healthy = poison, state.requests[0].sampling
    with pytest.raises(FloatingPointError, match="NaN"):
        engine.round(state)
    assert state.requests[0].tokens == before
    state.requests[0].sampling = healthy
    list(engine.rounds(state))
    plain = engine.generate_one(PROMPTS[0], max_new_tokens=9, stop_ids=set())
    assert state.requests[0].new_tokens == plain.tokens


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: choose 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0: choose a whole number >= 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"seed": -3}, "seed=-3"),
    ],
)
def test_settings_out_of_range_say_what_is_allowed(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
