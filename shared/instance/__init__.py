"""What prefill and decode instances share: attempts, kept outputs, the compute thread, control, registration."""
