"""``mooncake load``: an open-loop load on any OpenAI-compatible server, and how it was served."""
