"""The transfer engine: the paper's interface over interchangeable transports."""
