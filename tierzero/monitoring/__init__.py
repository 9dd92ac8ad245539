"""Counters, clocks, timelines, and those who look at them."""
