"""Measuring the drive: what `tierzero bench nvme` runs."""
