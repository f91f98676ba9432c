"""Own kernels for CPUs, compiled once on the user's machine, and torch paths for where that fails.

`build` compiles, `native` loads, the others turn tensors into calls. C sources are in `native/`.
"""
