"""KV memory: how entries are laid out, which pages are whose, and which prefixes can be shared."""
