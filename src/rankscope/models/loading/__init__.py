"""Loading: one way in for every model."""

from rankscope.models.loading._load import LoadedModel, load, transformers_config
from rankscope.models.loading.twin import load_initialised_twin

__all__ = ["LoadedModel", "load", "load_initialised_twin", "transformers_config"]
