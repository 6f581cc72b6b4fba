"""Predicted curves at initialisation: one file per oracle, each with the assumptions it rests on."""
