"""Reporters: terminal, markdown, json and plots, all from the same tables."""
