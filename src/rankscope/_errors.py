"""The old place of :mod:`rankscope.errors`."""

from rankscope.errors import *  # noqa: F403
