"""Predicted curves at initialisation: one file per oracle, each with its assumptions."""
