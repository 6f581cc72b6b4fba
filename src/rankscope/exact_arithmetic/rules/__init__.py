"""How each ATen operation acts on a deviation; one file per group, all read by importing this package."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
