"""Sampling and verification: which token the target emits, and how far a draft tree is accepted."""
