"""A target without its layers embeds and reads features as the whole one."""

import pytest
import torch

from eaglelab.target import FrozenTarget, HeadOnlyTarget, default_taps
from tests.target.target_families import FAMILIES, VOCAB, build


@pytest.mark.parametrize("name", FAMILIES)
def test_embedding_head_and_identity_are_those_of_the_whole_target(name, tmp_path):
    build(name).save_pretrained(tmp_path)
    whole, head = FrozenTarget.load(tmp_path), HeadOnlyTarget.load(tmp_path)
    ids = torch.arange(VOCAB)[None]
    hidden = torch.randn(1, 5, whole.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.embed(ids), whole.embed(ids), rtol=0, atol=0)
    torch.testing.assert_close(head.lm_head(hidden), whole.lm_head(hidden), rtol=0, atol=0)
    assert head.fingerprint == whole.fingerprint
    assert (head.num_layers, head.max_positions) == (whole.num_layers, whole.max_positions)
    assert head.text_config.to_dict() == whole.text_config.to_dict()


def test_layers_are_gone_and_say_so():
    head = HeadOnlyTarget.load("bundled")
    embedding = head.embedding_size * head.hidden_size
    assert sum(parameter.numel() for parameter in head.parameters()) <= embedding + head.hidden_size
    assert head.source == "bundled" and default_taps(head.num_layers) == (2, 6, 9)
    with pytest.raises(ValueError, match="without its layers"):
        head.features(torch.zeros(1, 4, dtype=torch.int64), ("final",))
    with pytest.raises(ValueError, match="without its layers"):
        head.new_cache(1, 8)


def test_reads_one_layer_where_the_checkpoint_allows(monkeypatch):
    seen = []
    drop = HeadOnlyTarget._drop_layers
    monkeypatch.setattr(
        HeadOnlyTarget, "_drop_layers", lambda self, config: (seen.append(self.num_layers), drop(self, config))
    )
    HeadOnlyTarget.load("bundled")
    assert seen == [1]


def test_wrong_sources_are_refused_as_for_a_whole_target(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        HeadOnlyTarget.load(tmp_path)
