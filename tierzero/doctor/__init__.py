"""What `tierzero doctor` looks at: findings about a machine and its drives, and a self-test of every I/O backend.

Nothing here needs torch at import: a machine without it must be told so.
"""
