"""Headwater: Mixture-of-Experts models at published precision on one machine."""
