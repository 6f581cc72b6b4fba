"""Models larger than memory: the weights of one block at a time, read from a local folder, the hub or a server."""
