"""Speculative decoding: tree policies, verification, commit, the engine."""

from eaglelab.decoding.engine import Engine
from eaglelab.decoding.policies import Chain, DynamicTree, SampledTree, StaticTree, make_tree
from eaglelab.decoding.protocol import Drafter, DraftSeed, TreePolicy
from eaglelab.decoding.records import GenerationResult, RoundRecord
from eaglelab.decoding.sampling import Sampling
from eaglelab.decoding.tree import FlatTree, Topology, Tree

__all__ = [
    "Chain",
    "DraftSeed",
    "Drafter",
    "DynamicTree",
    "Engine",
    "FlatTree",
    "GenerationResult",
    "RoundRecord",
    "SampledTree",
    "Sampling",
    "StaticTree",
    "Topology",
    "Tree",
    "TreePolicy",
    "make_tree",
]
