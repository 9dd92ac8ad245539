"""The store on the drives: extents, versions, snapshots, locks, striping."""
