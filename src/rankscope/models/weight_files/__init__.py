"""Files of weights that are read by range: in a local folder, on the hub, on a web server or in an object store."""
