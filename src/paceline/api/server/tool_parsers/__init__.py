"""Tool parsers: how model families write calls of functions, and how to read them back."""
