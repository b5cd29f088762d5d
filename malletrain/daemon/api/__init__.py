"""The requests of clients: what they may see and change."""
