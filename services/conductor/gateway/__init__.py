"""The gateway: OpenAI's HTTP API in front of a dispatcher. Text on one side, token ids on the other."""
