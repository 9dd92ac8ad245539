"""The `tierzero` command line."""
