"""Finds the residual streams of a model: its blocks, what they add, and what each branch is."""
