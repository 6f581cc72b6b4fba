"""Loading: one way in for every model."""

from rankscope.models.loading._load import LoadedModel, load, need_module, transformers_config
from rankscope.models.loading.twin import load_initialised_twin

__all__ = ["LoadedModel", "load", "load_initialised_twin", "need_module", "transformers_config"]
