"""Tree rows against plain text: each path of a tree is one sentence decoded alone."""

from __future__ import annotations

import pytest
import torch

from eaglelab.target import FrozenTarget
from tests.target.target_families import FAMILIES, VOCAB, build, target_of

families = pytest.mark.parametrize("family", FAMILIES)
TAPS = (1, "final")


class RandomTree:
    """N rows after a frontier: row 0 is the root, each later row hangs below an earlier one."""

    def __init__(self, rows: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.parents = [-1] + [int(torch.randint(0, n, (), generator=random)) for n in range(1, rows)]
        self.tokens = torch.randint(0, VOCAB, (rows,), generator=random)
        self.paths = [self._path(n) for n in range(rows)]
        self.depths = torch.tensor([len(path) - 1 for path in self.paths])
        self.ancestors = torch.zeros(rows, rows, dtype=torch.bool)
        for n, path in enumerate(self.paths):
            self.ancestors[n, path] = True

    def _path(self, n: int) -> list[int]:
        return [] if n < 0 else [*self._path(self.parents[n]), n]

    def jumping(self) -> list[int]:
        """The longest path whose rows do not lie side by side."""
        return max((path for path in self.paths if path != list(range(len(path)))), key=len)


def check_tree(target: FrozenTarget, texts: list[list[int]], trees: list[RandomTree], output) -> float:
    """Largest difference between a tree row and the same path as plain text."""
    worst = 0.0
    for b, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        for n, path in enumerate(tree.paths):
            ids_1S = torch.tensor([[*text, *tree.tokens[path].tolist()]])
            plain = target.features(ids_1S, TAPS)
            logits_V = target.lm_head(plain["final"][0, -1])
            worst = max(worst, float((output.logits_BNV[b, n] - logits_V).abs().max()))
            for tap in TAPS:
                worst = max(worst, float((output.features[tap][b, n] - plain[tap][0, -1]).abs().max()))
    return worst


@families
@pytest.mark.parametrize("lengths", [[11], [5, 13, 8]], ids=["one", "ragged"])
def test_tree_commit_and_another_round(family: str, lengths: list[int]) -> None:
    target = target_of(family)
    B, rows = len(lengths), 9
    random = torch.Generator().manual_seed(len(lengths))
    texts = [torch.randint(0, VOCAB, (length,), generator=random).tolist() for length in lengths]
    cache = target.new_cache(B, capacity=max(lengths) + 3 * rows)

    width = max(lengths)
    prompt_BN = torch.tensor([text + [-100] * (width - len(text)) for text in texts])
    output = target.forward_rows(prompt_BN, None, cache, count_B=lengths, taps=TAPS, logits="last")
    for b, text in enumerate(texts):
        alone = target.features(torch.tensor([text]), TAPS)
        assert float((output.features[1][b, : len(text)] - alone[1][0]).abs().max()) < 1e-5
        last_V = target.lm_head(alone["final"][0, -1])
        assert float((output.logits_BNV[b, 0] - last_V).abs().max()) < 1e-5
    assert bool(torch.isfinite(output.features["final"]).all())
    cache.commit(None, lengths)

    for round_ in range(3):
        trees = [RandomTree(rows, seed=10 * round_ + b) for b in range(B)]
        tokens_BN = torch.stack([tree.tokens for tree in trees])
        depth_BN = torch.stack([tree.depths for tree in trees])
        position_BN = cache.lengths_B()[:, None] + depth_BN
        ancestor_BNN = torch.stack([tree.ancestors for tree in trees])
        output = target.forward_rows(tokens_BN, position_BN, cache, ancestor_BNN=ancestor_BNN, taps=TAPS)
        assert check_tree(target, texts, trees, output) < 2e-5
        if round_ == 1:  # nothing of a discarded tree may be seen by the next
            cache.discard()
            continue
        accepted = [tree.jumping() for tree in trees]
        counts = [len(path) for path in accepted]
        table_BA = torch.tensor([path + [0] * (max(counts) - len(path)) for path in accepted])
        cache.commit(table_BA, counts)
        for text, path, tree in zip(texts, accepted, trees, strict=True):
            text += tree.tokens[path].tolist()
        assert cache.lengths == [len(text) for text in texts]

    for b, text in enumerate(texts):
        fresh = target.new_cache(1, len(text))
        target.forward_rows(torch.tensor([text]), None, fresh)
        for layer in range(target.num_layers):
            for kept, new in zip(cache.slots(layer), fresh.slots(layer), strict=True):
                assert float((kept[b, :, : len(text)] - new[0, :, : len(text)]).abs().max()) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_token_by_token_equals_the_whole_text(family: str) -> None:
    target = target_of(family)
    ids_1S = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(1))
    whole_SV = target.lm_head(target.features(ids_1S, ("final",))["final"])[0]
    cache = target.new_cache(1, 20)
    for t in range(20):
        logits_V = target.forward_rows(ids_1S[:, t : t + 1], None, cache).logits_BNV[0, 0]
        assert float((logits_V - whole_SV[t]).abs().max()) < 1e-5
        cache.commit(None, [1])


def test_a_finished_sequence_rides_along_without_rows() -> None:
    target = target_of("mistral")
    ids_BN = torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(2))
    cache = target.new_cache(2, 9)
    target.forward_rows(ids_BN, None, cache, count_B=[6, 3])
    cache.commit(None, [6, 3])
    rows_BN = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
    output = target.forward_rows(rows_BN, None, cache, count_B=[0, 5])  # 6 + 5 would not fit
    assert bool(torch.isfinite(output.logits_BNV).all())
    text_1S = torch.cat([ids_BN[1, :3], rows_BN[1]])[None]
    wanted_NV = target.lm_head(target.features(text_1S, ("final",))["final"])[0, 3:]
    assert float((output.logits_BNV[1] - wanted_NV).abs().max()) < 1e-5
    cache.commit(None, [0, 5])
    assert cache.lengths == [6, 8]


def test_half_precision_and_eager_trees_run() -> None:
    for changes in ({"dtype": torch.bfloat16}, {"attn_implementation": "eager"}):
        model = build("gemma3", **changes).to(changes.get("dtype", torch.float32))
        target = FrozenTarget(model)
        cache = target.new_cache(1, 16)
        output = target.forward_rows(torch.ones(1, 4, dtype=torch.long), None, cache)
        assert output.logits_BNV.dtype == target.dtype
        assert bool(torch.isfinite(output.logits_BNV).all())


def test_a_full_cache_is_an_error_that_leaves_it_intact() -> None:
    target = target_of("llama")
    cache = target.new_cache(1, 6)
    target.forward_rows(torch.ones(1, 4, dtype=torch.long), None, cache)
    cache.commit(None, [4])
    with pytest.raises(ValueError, match="capacity of 6.*at least 7 slots"):
        target.forward_rows(torch.ones(1, 3, dtype=torch.long), None, cache)
    assert cache.pending == 0
    assert cache.lengths == [4]
    target.forward_rows(torch.ones(1, 2, dtype=torch.long), None, cache)
    assert cache.pending == 2


@pytest.mark.parametrize(
    ("tokens", "arguments", "says"),
    [
        ([[VOCAB]], {}, f"token id {VOCAB}"),
        ([[1], [2]], {}, "cache of 1 sequences"),
        ([[1, 2]], {"position": [[0]]}, "position_BN has shape"),
        ([[1, 2]], {"ancestor": [[[1]]]}, "ancestor_BNN has shape"),
        ([[1, 2]], {"count_B": [3]}, "count_B"),
        ([[1, 2]], {"taps": (9,)}, "tap 9"),
        ([[1]], {"position": [[128]]}, "context of 128"),
    ],
)
def test_illegal_rows_are_refused(tokens: list, arguments: dict, says: str) -> None:
    target = target_of("llama")
    cache = target.new_cache(1, 200)
    target.forward_rows(torch.ones(1, 128, dtype=torch.long), None, cache)
    cache.commit(None, [128])
    position = arguments.pop("position", [[127] * len(tokens[0])])
    ancestor = arguments.pop("ancestor", None)
    with pytest.raises(ValueError, match=says):
        target.forward_rows(
            torch.tensor(tokens),
            torch.tensor(position),
            cache,
            ancestor_BNN=None if ancestor is None else torch.tensor(ancestor),
            **arguments,
        )
    assert cache.pending == 0


def test_padding_rows_have_no_position_to_exceed() -> None:
    target = target_of("gpt2")
    cache = target.new_cache(2, 128)
    target.forward_rows(torch.ones(2, 127, dtype=torch.long), None, cache, count_B=[127, 3])
    cache.commit(None, [127, 3])
    output = target.forward_rows(torch.ones(2, 5, dtype=torch.long), None, cache, count_B=[0, 5])
    assert bool(torch.isfinite(output.logits_BNV).all())


def test_rows_past_the_context_are_refused() -> None:
    target = target_of("gpt2")
    cache = target.new_cache(1, 300)
    with pytest.raises(ValueError, match="position 128 is outside"):
        target.forward_rows(torch.ones(1, 129, dtype=torch.long), None, cache)
