"""Activations that leave the device between forward and backward."""
