"""Profiling: who listens to the parts of a step."""
