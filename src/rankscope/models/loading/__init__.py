"""Loading: one entry point for every model."""

from rankscope.models.loading._load import LoadedModel, load, load_initialised_twin, need_module, transformers_config

__all__ = ["LoadedModel", "load", "load_initialised_twin", "need_module", "transformers_config"]
