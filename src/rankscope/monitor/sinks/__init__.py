"""Places a gauge writes to beside its record: one file per tracker, each imported only when it is asked for."""
