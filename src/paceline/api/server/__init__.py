"""The server: an OpenAI-compatible HTTP interface over an LLM. Nothing here is global."""
