"""Model engines and the interfaces that they and the services share."""
