"""Hidden states that were computed elsewhere: read from files or arrays, layer by layer, and measured."""
