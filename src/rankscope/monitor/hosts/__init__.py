"""The gauge inside training loops that others wrote: one file per host, each imported only when it is asked for."""
