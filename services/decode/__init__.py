"""Landing of KV, continuous batching and the token stream."""
