"""Causes by name: each check looks at the evidence of a run and says what it found, with numbers."""
