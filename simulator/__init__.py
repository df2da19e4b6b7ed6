"""The cluster in virtual time: it drives the conductor's own scheduling objects, so what it shows is what they do."""
