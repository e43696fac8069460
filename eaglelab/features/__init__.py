"""Features of the target, online or from a store, behind one interface.

:class:`FeatureSource` is what training sees; ``eaglelab cache`` writes a store with :class:`StoreWriter`.
"""

from eaglelab.features.contents import Contents
from eaglelab.features.source import Features, FeatureSource, OnlineFeatures

__all__ = ["Contents", "FeatureSource", "Features", "OnlineFeatures"]
