"""The Python interface: text in, text out."""
