"""Placement of a model over tiers, and what a run will take, before anything is allocated."""
