"""Files of weights that are read by range: in a local folder, on the hub or in an object store."""
