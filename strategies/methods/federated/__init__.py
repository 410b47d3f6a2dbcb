"""Federated averaging: rounds, clients, and the server."""
