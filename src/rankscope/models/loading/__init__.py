"""Loading: one way in for every model."""

from rankscope.models.loading._load import LoadedModel, load, transformers_config

__all__ = ["LoadedModel", "load", "transformers_config"]
