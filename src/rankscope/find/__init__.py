"""What the graph of a pass says about a model: which ways the stream has around the branches of its blocks."""
