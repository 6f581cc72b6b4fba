"""Sinks of a gauge, in addition to its record: one file per tracker, each imported only when used."""
